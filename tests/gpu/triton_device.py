"""TorchInductor and Triton for a GPU that is not there.

Inductor is told that the machine has an A100 or H100, and generates Triton for `cuda:0` from graphs
that were traced on CPU tensors. What happens then depends on the environment, which must be set
before this module is imported:

    TRITON_INTERPRET=1    Triton's interpreter runs the generated kernels on CPU tensors, so that
                          their results can be compared with eager ones.
    ARCH=80 or ARCH=90    Triton and ptxas make real cubins. Nothing is launched, so results are
                          undefined; `CUBINS` has registers, spills and shared memory of each.

It proves code generation and numbers. It says nothing about races, time, NCCL or memory. Importing
it changes torch for the whole process: use a process of its own (see `run_cases.py`).
"""

# mypy: ignore-errors
# Replaces private functions of torch and Triton that have no annotations. Written for torch 2.13.

from __future__ import annotations

import functools
import os
import re
import subprocess
import tempfile
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch._dynamo.device_interface as interface
import torch._inductor.fx_passes.joint_graph as joint_graph
import torch._inductor.runtime.triton_heuristics as heuristics
import triton
import triton.language as tl
from functorch.compile import min_cut_rematerialization_partition
from torch._dynamo.backends.common import aot_autograd
from torch._inductor import config
from torch._inductor.compile_fx import compile_fx_inner
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.graph import GraphLowering
from torch._inductor.runtime import triton_helpers
from torch._subclasses import fake_tensor
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

from tests.pretended.device import pretended

ARCH = int(os.environ.get("ARCH", "90"))
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
CUDA = torch.device("cuda:0")
H100 = {
    "name": "NVIDIA H100 80GB HBM3",
    "major": 9,
    "minor": 0,
    "multi_processor_count": 132,
    "total_memory": 80 << 30,
    "warp_size": 32,
    "regs_per_multiprocessor": 65536,
    "max_threads_per_multi_processor": 2048,
    "max_threads_per_block": 1024,
    "shared_memory_per_block": 49152,
    "shared_memory_per_block_optin": 232448,
    "shared_memory_per_multiprocessor": 233472,
    "L2_cache_size": 50 << 20,
    "gcnArchName": "",
    "is_integrated": 0,
    "is_multi_gpu_board": 0,
    "uuid": "0",
    "clock_rate": 1980000,
    "memory_clock_rate": 2619000,
    "memory_bus_width": 5120,
}
A100 = H100 | {
    "name": "NVIDIA A100-SXM4-80GB",
    "major": 8,
    "multi_processor_count": 108,
    "shared_memory_per_block_optin": 166912,
    "shared_memory_per_multiprocessor": 167936,
    "L2_cache_size": 40 << 20,
}
PROPERTIES = SimpleNamespace(**(H100 if ARCH == 90 else A100))


class Cubin(NamedTuple):
    """A kernel that ptxas has made."""

    name: str
    registers: int
    spilled: int  # bytes stored and loaded
    shared: int  # bytes


CUBINS: list[Cubin] = []
MODULES: list[str] = []
"""The source of every generated module; a graph has one for the forward and one for the
backward."""
LAUNCHES: Counter[str] = Counter()
FAULTY = False
"""Whether one multiplication of every module is made wrong by one percent: a negative control."""


class _Driver:
    """Triton's driver, as far as a compilation asks it."""

    class utils:  # noqa: N801
        @staticmethod
        def get_device_properties(device):
            return {
                "max_shared_mem": PROPERTIES.shared_memory_per_block_optin,
                "multiprocessor_count": PROPERTIES.multi_processor_count,
                "warpSize": 32,
                "max_num_regs": 65536,
            }

        @staticmethod
        def unload_module(module):
            pass

    def get_current_target(self):
        return GPUTarget("cuda", ARCH, 32)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device=0):
        return 0

    def get_active_torch_device(self):
        return CUDA

    def get_device_interface(self):
        return torch.cuda

    def map_python_to_cpp_type(self, kind):
        return kind


class _Guard:
    def __init__(self, index):
        pass

    def __enter__(self):
        pass

    def __exit__(self, *error):
        return False


class _Libdevice:
    """The interpreter has no libdevice; these functions of `tl` compute the same."""

    mul_rn = staticmethod(lambda a, b: a * b)
    add_rn = staticmethod(lambda a, b: a + b)
    sub_rn = staticmethod(lambda a, b: a - b)
    div_rn = staticmethod(lambda a, b: a / b)
    isnan = staticmethod(lambda a: a != a)
    isinf = staticmethod(lambda a: (a == float("inf")) | (a == float("-inf")))
    exp = staticmethod(lambda a: tl.exp(a))
    exp2 = staticmethod(lambda a: tl.exp2(a))
    log = staticmethod(lambda a: tl.log(a))
    log2 = staticmethod(lambda a: tl.log2(a))
    sqrt = staticmethod(lambda a: tl.sqrt(a))
    rsqrt = staticmethod(lambda a: tl.rsqrt(a))
    floor = staticmethod(lambda a: tl.floor(a))
    abs = staticmethod(lambda a: tl.abs(a))
    pow = staticmethod(lambda a, b: tl.exp(b * tl.log(a + b * 0)))

    @staticmethod
    def trunc(a):
        return tl.where(a < 0, -tl.floor(-a), tl.floor(a))

    @staticmethod
    def nearbyint(a):
        up = tl.floor(a + 0.5)
        return tl.where((up == a + 0.5) & (up - 2 * tl.floor(up / 2) == 1), up - 1, up)

    @staticmethod
    def log1p(a):
        u = 1.0 + a  # Kahan's correction keeps the precision of small `a`
        return tl.where(u == 1.0, a, tl.log(u) * (a / tl.where(u == 1.0, 1.0, u - 1.0)))


def _install():
    with pretended():  # registers a device guard, which autograd asks for; needs g++
        pass
    replaced = {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "set_device": lambda device: None,
        "get_device_properties": lambda device=None: PROPERTIES,
        "get_device_capability": lambda device=None: (PROPERTIES.major, 0),
        "get_device_name": lambda device=None: PROPERTIES.name,
        "synchronize": lambda device=None: None,
        "_exchange_device": lambda device: 0,
        "_maybe_exchange_device": lambda device: 0,
        "is_bf16_supported": lambda *a, **k: True,
        "is_initialized": lambda: False,
        "current_stream": lambda device=None: SimpleNamespace(cuda_stream=0),
        "get_rng_state": lambda device=None: torch.get_rng_state(),
        "set_rng_state": lambda state, device=None: None,
        "_DeviceGuard": _Guard,
    }
    for name, value in replaced.items():
        setattr(torch.cuda, name, value)
    torch.version.cuda = "13.0"
    torch._C._cuda_getCurrentRawStream = lambda device: 0
    torch._C._dynamo.guards._empty_strided_cuda = lambda size, stride, dtype: torch.empty_strided(
        size, stride, dtype=dtype
    )
    asked = (
        "is_available",
        "device_count",
        "current_device",
        "set_device",
        "get_device_properties",
        "synchronize",
    )
    for name in asked:
        setattr(interface.CudaInterface, name, staticmethod(replaced[name]))
    for name in ("exchange_device", "maybe_exchange_device", "get_raw_stream"):
        setattr(interface.CudaInterface, name, staticmethod(lambda device: 0))
    interface.caching_worker_device_properties["cuda"] = [PROPERTIES]
    fake_tensor.init_gpu_context = lambda device: None
    driver._default = driver._active = _Driver()
    config.compile_threads, config.force_disable_caches = 1, True
    config.triton.cudagraphs, config.use_static_triton_launcher = False, False
    config.joint_graph_constant_folding = False  # it evaluates scalars on the device
    # its patterns allocate on the device; none is ours
    joint_graph.lazy_init = lambda *a, **k: None
    triton_helpers.set_driver_to_gpu = lambda: None
    GraphLowering.codegen = _codegen
    heuristics.CachingAutotuner.run = _run
    if INTERPRETED:
        triton_helpers.libdevice = _Libdevice
    else:
        heuristics.CachingAutotuner._make_launchers = _make_launchers
        heuristics.CachingAutotuner._dynamic_scale_rblock = lambda self: None


_generate, _launch = GraphLowering.codegen, heuristics.CachingAutotuner.run


def _codegen(self, *args, **kwargs):
    wrapper, kernels = _generate(self, *args, **kwargs)
    if FAULTY:
        wrapper.value = re.sub(
            r"(tmp\d+ = tmp\d+ \* tmp\d+)\n", r"\1 * 1.01\n", wrapper.value, count=1
        )
    MODULES.append(wrapper.value)
    return wrapper, kernels


def _run(self, *args, **kwargs):
    LAUNCHES[self.fn.__name__] += 1
    return _launch(self, *args, **kwargs) if INTERPRETED else None


def _make_launchers(self):
    """Called where Triton would load the cubins."""
    for result in self.compile_results:
        kernel = result.kernel
        registers, spilled = _resources(kernel.asm["ptx"])
        CUBINS.append(Cubin(self.fn.__name__, registers, spilled, kernel.metadata.shared))
    self.launchers = [lambda *a, **k: None for _ in self.compile_results]


def _resources(ptx: str) -> tuple[int, int]:
    """Registers of a thread and spilled bytes, as ptxas reports them."""
    ptxas = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "ptxas"
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        target = "sm_90a" if ARCH == 90 else f"sm_{ARCH}"
        command = [str(ptxas), "-v", f"--gpu-name={target}", file.name, "-o", os.devnull]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    registers = re.search(r"Used (\d+) registers", said)
    spills = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", said)
    return int(registers[1]), int(spills[1]) + int(spills[2])


def _on_device(x: Any) -> Any:
    """The same fake tensor on `cuda:0`. A float64 without dimensions, as Python floats and
    schedules are passed, stays on the host, as on a real GPU."""
    if not isinstance(x, torch.Tensor) or (x.ndim == 0 and x.dtype == torch.float64):
        return x
    return torch.empty_strided(x.size(), x.stride(), dtype=x.dtype, device=CUDA)


def _inductor(graph: torch.fx.GraphModule, inputs: list[Any], is_backward: bool) -> Any:
    """Inductor, told that all tensors of this graph of aten operations are on `cuda:0`."""
    for node in graph.graph.nodes:
        if node.kwargs.get("device") is not None:
            node.update_kwarg("device", CUDA)
    graph.recompile()
    with torch._dynamo.utils.detect_fake_mode(inputs):
        moved = [_on_device(x) for x in inputs]
    for node, value in zip(graph.graph.find_nodes(op="placeholder"), moved, strict=True):
        node.meta["val"] = value
    return compile_fx_inner(graph, moved, is_backward=is_backward)


backend = aot_autograd(
    fw_compiler=functools.partial(_inductor, is_backward=False),
    bw_compiler=functools.partial(_inductor, is_backward=True),
    decompositions=select_decomp_table(),
    partition_fn=functools.partial(min_cut_rematerialization_partition, compiler="inductor"),
    keep_inference_input_mutations=True,
)
"""A backend for `torch.compile`. Autograd traces on the CPU: its engine wants a real device."""

_install()
