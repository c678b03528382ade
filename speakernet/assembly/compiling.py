"""From the section `runtime` to the compiler and to recorded steps, or to the reasons why there are none."""

import logging
from collections.abc import Callable

import torch
from torch import nn

from speakernet.assembly.checks import compile_obstacles, graph_obstacles
from speakernet.config.schema import Config
from speakernet.frontend.perturbation import keep_draws_eager
from speakernet.machine.device import DeviceClock
from speakernet.training.compiling import Compiler, NoCompiler
from speakernet.training.interfaces import HasVocalTracts

logger = logging.getLogger(__name__)


def build_compiler(
    config: Config, net: nn.Module, device: torch.device, recover: Callable[[], None]
) -> Compiler | NoCompiler:
    """The compiler that `runtime.compile` asks for; what cannot work was refused before.

    Args:
        config: of the run.
        net: what is compiled.
        device: where it is trained.
        recover: undoes what a failed micro-batch has left behind.
    """
    runtime = config.runtime
    reasons = compile_obstacles(config, net, device)
    # Whether it pays is judged by measured times, which are never the same twice; `on` compiles before the first step.
    if runtime.deterministic and runtime.compile == "auto":
        reasons = ["deterministic: the moment of compiling depends on measured times"]
    if runtime.compile == "off" or reasons:
        if runtime.compile == "auto":
            logger.info("compile auto: off (%s)", "; ".join(reasons))
        if runtime.compile_scope != "auto":
            logger.warning("runtime.compile_scope: %s has no effect: nothing is compiled", runtime.compile_scope)
        if runtime.compile_mode != "default":
            logger.warning("runtime.compile_mode: %s has no effect: nothing is compiled", runtime.compile_mode)
        return NoCompiler()
    scope, mode = runtime.compile_scope, runtime.compile_mode
    scope = "whole" if scope == "auto" else scope
    if mode != "default" and device.type == "cpu":
        logger.warning("runtime.compile_mode: %s has no effect on a CPU", mode)
        mode = "default"
    options = runtime.model_copy(update={"compile_scope": scope, "compile_mode": mode})
    return Compiler(net, options, recover=recover, prepare=keep_draws_eager, clock=DeviceClock(device))


def records_steps(config: Config, net: nn.Module, device: torch.device) -> bool:
    """Whether whole steps are recorded; where `runtime.cuda_graphs` asks for the impossible, it was refused before."""
    wanted, data = config.runtime.cuda_graphs, config.data
    reasons = graph_obstacles(config, device)
    # These could be, but would not pay, or nobody has measured that they give the same bits.
    if data.crop_frames_max > data.crop_frames:
        reasons.append("crops have many lengths, and every length would be recorded anew")
    if config.runtime.deterministic:
        reasons.append("deterministic: not measured on a GPU to give the bits of a step that is not recorded")
    # A first stage may have given them to the network of the second.
    has_tracts = any(isinstance(module, HasVocalTracts) for module in net.modules())
    if has_tracts:
        reasons.append("the network has other vocal tracts, which the host says with each batch")
    if wanted == "off" or (wanted == "auto" and reasons) or has_tracts:
        # Of a CPU nobody expects it.
        level = logging.INFO if wanted == "auto" and device.type == "cuda" else logging.DEBUG
        logger.log(level, "CUDA graphs: off (%s)", "; ".join(reasons) if wanted != "off" else "switched off")
        return False
    logger.info("CUDA graphs: on (%s)", "asked for" if wanted == "on" else "nothing forbids it")
    return True
