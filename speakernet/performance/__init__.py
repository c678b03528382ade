"""What the hardware does and what to change: speed and memory of a run, machine facts, profiles, batch sizes."""

from speakernet.performance.batch_size import BatchSizeOptimizer
from speakernet.performance.profiler import StepProfiler
from speakernet.performance.system import (
    MemoryMonitor,
    log_performance_info,
    log_system_info,
    log_time,
    optimize_torch_settings,
    timed,
)
from speakernet.performance.tracker import PerformanceTracker

__all__ = [
    "BatchSizeOptimizer",
    "MemoryMonitor",
    "PerformanceTracker",
    "StepProfiler",
    "log_performance_info",
    "log_system_info",
    "log_time",
    "optimize_torch_settings",
    "timed",
]
