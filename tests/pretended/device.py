"""A CUDA device that is not there: tensors that say `cuda:0` and compute on the CPU.

Mixing them with CPU tensors is refused as CUDA refuses it. Every launch of a kernel is counted, and
every operation for which the host would have to wait: `.item()`, `nonzero`, a mask of bools as an
index, a copy that blocks. It says nothing of time.

    with pretended() as log:
        loss_fn = kf.NTXentLoss(temperature=0.1).to("cuda")
        loss_fn(on_device(z1), on_device(z2)).backward()
    assert not log.waits

Needs g++ and the headers that come with torch, for a device guard; without them `AVAILABLE` is
False.
"""

# mypy: ignore-errors
# The subclass is no tensor in the sense of the annotations of torch.

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed.fsdp  # before torch.cuda is touched
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

AVAILABLE = shutil.which("g++") is not None
CUDA = torch.device("cuda:0")
PACKAGE = str(Path(__file__).parents[2] / "src" / "kinfolk") + os.sep
aten = torch.ops.aten

NO_LAUNCH = frozenset(
    """detach alias view _unsafe_view expand slice select unsqueeze squeeze t transpose permute as_strided split split_with_sizes unbind
    unfold diagonal _reshape_alias lift_fresh chunk narrow unsafe_split unsafe_chunk expand_as view_as unsqueeze_ squeeze_ t_ transpose_
    sym_size sym_numel sym_stride stride size dim empty empty_like empty_strided new_empty new_empty_strided resize_ set_""".split()  # noqa: E501, SIM905
)
WAITS = frozenset(
    """_local_scalar_dense item nonzero masked_select _unique2 unique_consecutive unique_dim _unique bincount is_nonzero equal histc
    argwhere linalg_eigh _linalg_eigh _linalg_svd""".split()  # noqa: E501, SIM905
)
COPIES = {"copy_", "_to_copy", "_copy_from", "_copy_from_and_resize"}
INDEXING = {
    "index",
    "index_put",
    "index_put_",
    "_index_put_impl_",
    "_unsafe_index",
    "_unsafe_index_put",
}


class Log:
    """What happened on the device: launches, and where the host waited for it."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.launches, self.operations, self.waits = 0, Counter[str](), Counter[str]()

    def wait(self, what: str) -> None:
        self.waits[f"{what} at {_site()}"] += 1


LOG = Log()


class OnDevice(torch.Tensor):
    """A tensor that says it is on the device, and holds the CPU tensor that it is."""

    held: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, held: Tensor) -> OnDevice:
        with torch._C._DisableTorchDispatch():
            meta = torch.empty_strided(held.shape, held.stride(), dtype=held.dtype, device="meta")
            made: OnDevice = torch.Tensor._make_subclass(
                cls, meta, False, dispatch_device=False, device_for_backend_keys=CUDA
            )
        made.held = held
        return made

    device = property(lambda self: CUDA)
    is_cuda = property(lambda self: True)
    is_cpu = property(lambda self: False)
    is_meta = property(lambda self: False)

    def tolist(self) -> Any:
        LOG.wait("tolist")
        return self.held.tolist()

    def numpy(self, *args: Any, **kwargs: Any) -> Any:
        raise TypeError("can't convert cuda:0 device type tensor to numpy")

    def to(self, *args: Any, **kwargs: Any) -> Any:
        plain = [x.device if isinstance(x, Tensor) else x for x in args]
        device, dtype, blocking, layout = torch._C._nn._parse_to(
            *plain, **{k: v for k, v in kwargs.items() if k != "copy"}
        )
        dtype = args[0].dtype if args and isinstance(args[0], Tensor) else dtype
        device = None if device is not None and device.type == "cuda" else device
        if (
            device is None
            and dtype in (None, self.dtype)
            and layout is None
            and not kwargs.get("copy")
        ):
            return self
        where = {} if device is None else {"device": device, "non_blocking": bool(blocking)}
        return aten._to_copy.default(self, dtype=dtype, memory_format=layout, **where)

    def cuda(self, *args: Any, **kwargs: Any) -> Any:
        return self

    def cpu(self, *args: Any, **kwargs: Any) -> Any:
        return self.to("cpu")

    def __repr__(self, *args: Any, **kwargs: Any) -> str:
        return f"OnDevice({tuple(self.shape)}, {self.dtype})"

    def __deepcopy__(self, memo: Any) -> Any:
        made = memo.setdefault(
            id(self), OnDevice(self.held.clone()).requires_grad_(self.requires_grad)
        )
        made._is_param = getattr(self, "_is_param", False)
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


class _Mode(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


def on_device(x: Tensor, requires_grad: bool = False) -> Tensor:
    """A copy of the tensor on the device."""
    return OnDevice(x.detach().clone()).requires_grad_(requires_grad)


@contextlib.contextmanager
def pretended() -> Iterator[Log]:
    """Within, `.to("cuda")` works."""
    _install()
    LOG.reset()
    before = torch.__future__.get_overwrite_module_params_on_conversion()
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    try:
        with _Mode():
            yield LOG
    finally:
        torch.__future__.set_overwrite_module_params_on_conversion(before)


@functools.cache
def _install() -> None:
    """Builds the device guard, once for each version of torch, and lets torch believe in a
    device."""
    include = Path(torch.__file__).parent / "include"
    name = hashlib.sha256(f"{torch.__version__}{include}".encode()).hexdigest()[:12]
    library = Path(tempfile.gettempdir()) / f"pretended-device-{name}.so"
    if not library.exists():
        part = library.with_suffix(f".{os.getpid()}")
        source = Path(__file__).with_name("guard.cpp")
        command = [
            "g++",
            "-std=c++20",
            "-O1",
            "-shared",
            "-fPIC",
            f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}",
        ]
        command += [
            f"-I{include}",
            f"-I{include}/torch/csrc/api/include",
            str(source),
            f"-L{include.parent / 'lib'}",
            "-lc10",
        ]
        subprocess.run(
            [*command, f"-Wl,-rpath,{include.parent / 'lib'}", "-o", str(part)], check=True
        )
        part.rename(library)
    ctypes.CDLL(str(library))
    torch.cuda._lazy_init = lambda: None
    torch._C._set_only_lift_cpu_tensors(True)
    torch.amp.autocast_mode.is_autocast_available = lambda device: True


def _run(func: Any, args: Any, kwargs: Any) -> Any:
    """Checks where the tensors are, counts, and computes on the CPU."""
    if func is torch.ops.prim.device.default:
        return CUDA
    name = func._schema.name.split("::")[-1]
    flat = _leaves((args, kwargs), [])
    there = [x for x in flat if isinstance(x, OnDevice)]
    here = [x for x in flat if isinstance(x, Tensor) and not isinstance(x, OnDevice)]
    wanted = next((x for x in flat if isinstance(x, torch.device)), None)
    onto = bool(there) if wanted is None else wanted.type in ("cuda", "meta")
    if there and here and name not in COPIES:
        _refuse_mixing(name, func, args, kwargs, here)
    if there or onto:
        _count(name, args, kwargs, onto, wanted)
    out = func(*_each(args, _inner), **_each(kwargs, _inner))
    return _wrapped(func, args, kwargs, out) if onto else out


# Arguments and results are nested in lists, tuples and dicts only; pytree takes several times as
# long as the operations.
def _leaves(value: Any, found: list[Any]) -> list[Any]:
    kind = type(value)
    if kind is tuple or kind is list:
        for each in value:
            _leaves(each, found)
    elif kind is dict:
        for each in value.values():
            _leaves(each, found)
    else:
        found.append(value)
    return found


def _each(value: Any, function: Any) -> Any:
    """The same with all leaves replaced."""
    kind = type(value)
    if kind is tuple or kind is list:
        return kind([_each(each, function) for each in value])
    if kind is dict:
        return {key: _each(each, function) for key, each in value.items()}
    return function(value)


def _inner(x: Any) -> Any:
    if isinstance(x, OnDevice):
        return x.held
    return torch.device("cpu") if isinstance(x, torch.device) else x


def _outer(x: Any) -> Any:
    return OnDevice(x) if isinstance(x, Tensor) and not isinstance(x, OnDevice) else x


def _refuse_mixing(name: str, func: Any, args: Any, kwargs: Any, here: list[Tensor]) -> None:
    wrong = [x for x in here if x.dim()]
    if name in INDEXING and isinstance(args[0], OnDevice):
        if any(isinstance(x, Tensor) and not isinstance(x, OnDevice) for x in args[1]):
            LOG.wait("index from the CPU")
        wrong = (
            [args[2]]
            if name.startswith("index_put") and not isinstance(args[2], OnDevice) and args[2].dim()
            else []
        )
    written = _written(func, args, kwargs).values()
    wrong += [x for x in written if isinstance(x, Tensor) and not isinstance(x, OnDevice)]
    if wrong:
        raise RuntimeError(
            f"Expected all tensors to be on the same device, but found cuda:0 and cpu: {name} at"
            f" {_site()}"
        )


def _count(name: str, args: Any, kwargs: Any, onto: bool, wanted: torch.device | None) -> None:
    if name not in NO_LAUNCH:
        LOG.launches += 1
        LOG.operations[name] += 1
    by_mask = name in INDEXING and any(
        x is not None and x.dtype in (torch.bool, torch.uint8) for x in args[1]
    )
    counted = name == "repeat_interleave" and kwargs.get("output_size") is None
    if name in WAITS or by_mask or counted:
        LOG.wait(name)
    if name in COPIES:
        first, second = args[0], args[1] if len(args) > 1 else None
        away = (isinstance(first, OnDevice) and not onto) or (
            not isinstance(first, OnDevice) and isinstance(second, OnDevice)
        )
        arriving = (
            (not isinstance(first, OnDevice) and onto)
            if name == "_to_copy"
            else not isinstance(second, OnDevice)
        )
        if (away or arriving) and not (kwargs.get("non_blocking") or (len(args) > 2 and args[2])):
            LOG.wait(f"{name} between devices")


@functools.cache
def _aliases(func: Any) -> tuple[list[tuple[int, str, frozenset[str]]], list[frozenset[str]]]:
    """The arguments that the operation writes to, with their places and the names that the schema
    gives them, and the names of each result that is such an argument."""
    written = [
        (place, argument.name, frozenset(argument.alias_info.before_set))
        for place, argument in enumerate(func._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    returned = [
        frozenset(result.alias_info.before_set)
        if result.alias_info is not None and result.alias_info.is_write
        else frozenset()
        for result in func._schema.returns
    ]
    return written, returned


def _written(func: Any, args: Any, kwargs: Any) -> dict[frozenset[str], Any]:
    """What the operation writes to, by the names of its schema."""
    out = {}
    for place, name, names in _aliases(func)[0]:
        value = args[place] if place < len(args) else kwargs.get(name)
        if value is not None:
            out[names] = value
    return out


def _wrapped(func: Any, args: Any, kwargs: Any, out: Any) -> Any:
    """The results as tensors on the device; what was written in place is the tensor that was handed
    over."""
    returns, written = _aliases(func)[1], _written(func, args, kwargs)
    several = isinstance(out, (tuple, list)) and len(returns) > 1
    results = [
        written[names] if names in written else _each(value, _outer)
        for value, names in zip(out if several else (out,), returns, strict=False)
    ]
    if several:
        return type(out)(results) if not hasattr(out, "_fields") else type(out)(*results)
    return results[0] if results else None


def _site() -> str:
    """The innermost line of the package."""
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename.startswith(PACKAGE):
            return f"{frame.f_code.co_filename[len(PACKAGE) :]}:{frame.f_lineno}"
        frame = frame.f_back
    return "the test"
