"""When and how the network is compiled: never, from the start, or once the steps left repay the cost.

Compilation is done in place (`Module.compile`), so saved keys never change. Evaluation runs eagerly: its lengths differ
from utterance to utterance, and each would be compiled anew.
"""

import contextlib
import logging
import platform
import shutil
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from speakernet.files import error_line
from speakernet.machine.device import DeviceClock
from speakernet.random import capture_random_state, restore_random_state
from speakernet.training.options import CompileOptions

logger = logging.getLogger(__name__)

# Steps measured eagerly before `auto` decides; the first few warm caches up and are left out.
OBSERVED_STEPS = 20
WARMUP_STEPS = 5
# Measured on two CPU cores (benchmarks/measurements.md): the share of a step that compiling saves; cost per layer.
ASSUMED_SAVING = 0.10
SECONDS_PER_LAYER = 0.5
# Compile only for a clear gain: the two figures above are estimates.
REQUIRED_GAIN = 2.0


class NoCompiler:
    """Leaves the network as it is."""

    is_compiled = False

    def run(self, forward_backward: Callable[[], None]) -> None:
        """Run a micro-batch."""
        forward_backward()

    def consider(self, step: int, steps_left: int) -> None:
        """Nothing to decide."""

    def paused(self) -> contextlib.AbstractContextManager[Any]:
        """A context in which nothing is compiled."""
        return contextlib.nullcontext()

    def close(self) -> None:
        """Nothing to undo."""


class Compiler:
    """Compiles `net` in place when its time has come, and goes back to eager execution when that fails.

    Args:
        net: the network; its parameters' names stay as they are.
        options: when and how; the scope is whole or regional, what `auto` means is the caller's to decide.
        recover: undoes what a failed micro-batch has left behind (gradients, batch-norm statistics).
        prepare: called with the network before it is compiled.
        clock: of the device; None: that of a CPU.
    """

    def __init__(
        self,
        net: nn.Module,
        options: CompileOptions,
        *,
        recover: Callable[[], None],
        prepare: Callable[[nn.Module], None],
        clock: DeviceClock | None = None,
    ) -> None:
        self.net = net
        self.options = options
        self.recover = recover
        self.prepare = prepare
        self.is_compiled = False
        self._is_proven = False
        self._is_settled = options.compile == "on"
        self._eager_seconds = 0.0
        self._clock = DeviceClock(torch.device("cpu")) if clock is None else clock
        if options.compile == "on":
            self._compile()

    def run(self, forward_backward: Callable[[], None]) -> None:
        """Run a micro-batch; the first compiled one may fail, and is then repeated eagerly."""
        if not self.is_compiled or self._is_proven:
            forward_backward()
            return
        random_state = capture_random_state()
        begin = time.perf_counter()
        try:
            forward_backward()
        except Exception as error:
            # Whatever the compiler raises (its own errors, a missing C++ compiler, a bug): the eager network is the
            # reference, and an error of the network itself comes again when it runs eagerly.
            self._uncompile()
            logger.warning("compilation failed, going on without it: %s", error_line(error))
            self.recover()
            restore_random_state(random_state)
            forward_backward()
            return
        self._is_proven = True
        logger.info(
            "compiled (%s, %s) in %.1f s",
            self.options.compile_scope,
            self.options.compile_mode,
            time.perf_counter() - begin,
        )

    def consider(self, step: int, steps_left: int) -> None:
        """After a step: `auto` measures some steps, decides once, and takes a compilation back that did not pay."""
        if self._is_settled or self.options.compile != "auto":
            return
        self._clock.mark()
        if len(self._clock) < OBSERVED_STEPS:
            return
        # The median: an evaluation or a save between two steps counts for one of them.
        usual = sorted(self._clock.take()[WARMUP_STEPS:])[(OBSERVED_STEPS - WARMUP_STEPS) // 2]
        if self.is_compiled:
            self._judge(usual)
        else:
            self._decide(usual, steps_left)

    def _decide(self, usual: float, steps_left: int) -> None:
        gain, cost = estimate(usual, steps_left, num_layers(self.net))
        verdict = gain > REQUIRED_GAIN * cost
        logger.info("compile auto: %s", in_words(gain, cost, steps_left))
        self._eager_seconds = usual
        self._is_settled = not verdict
        if verdict:
            self._compile()

    def _judge(self, usual: float) -> None:
        """Some networks run slower compiled (VGGVox on a CPU does): then the eager code is taken back."""
        self._is_settled = True
        # VGGVox takes 0.325 of the plain definition's step eager and 0.39 compiled (benchmarks/measurements.md).
        is_faster = usual < self._eager_seconds
        logger.info(
            "compile auto: a step takes %.3f s, before %.3f s: %s",
            usual,
            self._eager_seconds,
            "kept" if is_faster else "going back to eager",
        )
        if not is_faster:
            self._uncompile()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Inside the block everything runs eagerly; compiled code is kept."""
        if not self.is_compiled:
            yield
            return
        with torch.compiler.set_stance("force_eager"):
            yield

    def close(self) -> None:
        """Leave an eager network: who uses it next (a second stage, say) has other lengths and may not wish to wait."""
        if self.is_compiled:
            self._uncompile()
        elif len(self._clock) and not self._is_settled:
            logger.info("compile auto: not compiled; it takes %d steps to judge by", OBSERVED_STEPS)

    def _compile(self) -> None:
        logger.info("compiling the network: the next step may take minutes")
        self.prepare(self.net)
        for module in self._targets():
            # dynamic=False: training crops have one length (a second length compiles a second version).
            module.compile(
                mode=None if self.options.compile_mode == "default" else self.options.compile_mode, dynamic=False
            )
        self.is_compiled = True

    def _uncompile(self) -> None:
        for module in self._targets():
            # What `Module.compile` sets; torch has no public way back.
            module._compiled_call_impl = None
        self.is_compiled = False
        self._is_settled = True

    def _targets(self) -> list[nn.Module]:
        return [self.net] if self.options.compile_scope == "whole" else repeated_blocks(self.net)


def estimate(step_seconds: float, steps_left: int, layers: int) -> tuple[float, float]:
    """Seconds that compiling would save, and seconds that it costs."""
    return ASSUMED_SAVING * step_seconds * steps_left, SECONDS_PER_LAYER * layers


def in_words(gain: float, cost: float, steps_left: int) -> str:
    """The decision, with the reason where it is against compiling; seconds.

    >>> in_words(45.0, 25.0, 900)
    'not compiling: about 45 s saved in the 900 steps left are no clear gain over 25 s of compiling (both are guesses)'
    """
    figures = f"about {gain:.0f} s saved in the {steps_left} steps left"
    if gain > REQUIRED_GAIN * cost:
        return f"compiling ({figures}, for about {cost:.0f} s of compiling)"
    verdict = "are no clear gain over" if gain > cost else "do not repay"
    return f"not compiling: {figures} {verdict} {cost:.0f} s of compiling (both are guesses)"


def num_layers(net: nn.Module) -> int:
    """Modules without children."""
    return sum(1 for module in net.modules() if not any(module.children()))


def repeated_blocks(net: nn.Module) -> list[nn.Module]:
    """The modules of classes that occur several times and have children: residual blocks and the like.

    A stage, which only strings blocks together, is looked into; a block is taken whole, with whatever repeats inside.
    Falls back to the whole network when nothing repeats.
    """
    counts: dict[type, int] = {}
    for module in net.modules():
        if any(module.children()) and not isinstance(module, nn.Sequential | nn.ModuleList):
            counts[type(module)] = counts.get(type(module), 0) + 1

    def collect(module: nn.Module) -> list[nn.Module]:
        if counts.get(type(module), 0) > 1 and not _is_stage(module):
            return [module]
        return [block for child in module.children() for block in collect(child)]

    return collect(net) or [net]


def _is_stage(module: nn.Module) -> bool:
    """Whether a module only holds lists of modules that have parts themselves."""
    lists = [child for child in module.children() if isinstance(child, nn.Sequential | nn.ModuleList)]
    is_only_lists = len(lists) == len(list(module.children()))
    return is_only_lists and all(any(entry.children()) for one in lists for entry in one)


def platform_obstacle(device: torch.device) -> str:
    """Why this machine cannot compile for the device, empty where it can."""
    if platform.system() == "Windows":
        return "torch.compile is not supported on Windows here"
    if device.type == "cpu" and not any(shutil.which(name) for name in ("g++", "clang++", "c++")):
        return "compiling for the CPU needs a C++ compiler (g++ or clang++), and none is in the PATH; install one"
    return ""
