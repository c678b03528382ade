"""ONNX in eight bits: weights of convolutions and products as integers, activations rounded as they come.

The front end stays in float32: its spectra reach over eight decades, and rounded to 256 steps only the loudest is left.
"""

import tempfile
from pathlib import Path

import onnx
from onnxruntime.quantization import QuantType, quantize_dynamic

FRONT_END = "net.front_end"
SCOPES = "pkg.torch.onnx.name_scopes"


def quantized(content: bytes) -> bytes:
    """The ONNX graph with dynamic int8 quantisation.

    Args:
        content: as `onnx_bytes` gives it.
    """
    model = onnx.load_from_string(content)
    kept = [node.name for node in model.graph.node if _is_of_front_end(node)]
    assert kept, "the nodes of the front end are no longer marked"
    with tempfile.TemporaryDirectory(prefix="speakernet-export-") as folder:
        source, target = Path(folder) / "float.onnx", Path(folder) / "int8.onnx"
        # Shapes of what lies between are inferred anew; with those of before, weights that are turned no longer fit.
        del model.graph.value_info[:]
        source.write_bytes(model.SerializeToString())
        quantize_dynamic(source, target, nodes_to_exclude=kept, weight_type=QuantType.QUInt8)
        return target.read_bytes()


def _is_of_front_end(node: object) -> bool:
    properties = {entry.key: entry.value for entry in node.metadata_props}  # type: ignore[attr-defined]
    return FRONT_END in properties.get(SCOPES, "")
