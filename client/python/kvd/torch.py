"""Tensors in the store. On the CPU they move without a copy in Python, and without any in memory of the arena.

    weights = kvd.torch.empty(client, (4096, 4096), torch.bfloat16)
    kvd.torch.load(client, "layer:7", weights)

A tensor of another device goes by memory of the arena. `register` makes these copies fast where there is CUDA.
"""

from __future__ import annotations

import contextlib
import math
from typing import Any, Optional, Sequence, Union

import torch

from . import _errors
from ._client import Client, Key, Seconds, dimensions
from ._view import View


def empty(client: Client, shape: Union[int, Sequence[int]], dtype: "torch.dtype" = torch.float32) -> "torch.Tensor":
    """Gives a tensor in the arena, whose bytes are not set. They are given back when all tensors on them are gone."""
    dims = dimensions(shape)
    n = math.prod(dims)
    if n == 0:
        return torch.empty(dims, dtype=dtype)
    memory = client._core.alloc(n * _bytes(dtype))
    return torch.frombuffer(memory, dtype=dtype, count=n).view(dims)


def get(
    client: Client,
    key: Key,
    shape: Union[int, Sequence[int]],
    dtype: "torch.dtype" = torch.float32,
    device: Any = "cpu",
) -> Optional["torch.Tensor"]:
    """Reads a value to a new tensor, in the arena if it is on the CPU; None: there is no such key.

    ValueError: the value has not the bytes of that shape and type.
    """
    on = torch.device(device)
    t = empty(client, shape, dtype) if on.type == "cpu" else torch.empty(dimensions(shape), dtype=dtype, device=on)
    try:
        load(client, key, t)
    except _errors.NotFound:
        return None
    return t


def load(client: Client, key: Key, tensor: "torch.Tensor") -> None:
    """Reads a value into a contiguous tensor of any device, which is filled when it returns.

    NotFound: the tensor is as before. ValueError: the value has another number of bytes. Of a shorter one the bytes
    are there then, on the CPU.
    """
    there = tensor if tensor.device.type == "cpu" else empty(client, tensor.shape, tensor.dtype)
    n, want = client.get_into(key, there), tensor.numel() * tensor.element_size()
    if n != want:
        raise ValueError(f"the value has {n} bytes, and the tensor {want}")
    if there is not tensor:
        if not tensor.is_contiguous():
            raise BufferError("the tensor is not contiguous")
        tensor.copy_(there)  # waits: the memory is given back behind it


class Loading:
    """A copy of a view to a tensor, see `start_load`. Until `wait` has returned the tensor's content is not to be used."""

    def __init__(self, view: View, event: Any) -> None:
        self._view, self._event = view, event

    def done(self) -> bool:
        """Tells whether `wait` would return at once, but for the verdict."""
        return self._event is None or bool(self._event.query())

    def wait(self) -> None:
        """Waits for the copy's end, and releases the view behind it.

        ViewExpired, or another error: the tensor may have other bytes than the value's. Load it again.
        """
        if self._event is not None:
            self._event.synchronize()
        self._view.release()


def start_load(client: Client, key: Key, tensor: "torch.Tensor", *, hold: Optional[Seconds] = None) -> Loading:
    """Begins to copy a value from where it is into a contiguous tensor of any device, and gives what to wait for.

    On a device the copy goes on behind the calls of its present stream. Exceptions are those of
    kvd.Client.get_view, with the tensor as before. ValueError: the value has another number of bytes.
    """
    if not tensor.is_contiguous():
        raise BufferError("the tensor is not contiguous")
    view = client.get_view(key, hold=hold)
    event = None
    try:
        want = tensor.numel() * tensor.element_size()
        if view.length != want:
            raise ValueError(f"the value has {view.length} bytes, and the tensor {want}")
        to, at = tensor.detach().reshape(-1).view(torch.uint8), 0
        for part in view._memories:  # not `parts`: torch warns of memory that is read-only
            to[at : at + len(part)].copy_(torch.frombuffer(part, dtype=torch.uint8), non_blocking=True)
            at += len(part)
        if tensor.device.type == "cuda":
            event = torch.cuda.Event()
            event.record(torch.cuda.current_stream(tensor.device))
    except BaseException:
        if tensor.device.type == "cuda":
            torch.cuda.synchronize(tensor.device)  # some parts may be under way
        with contextlib.suppress(_errors.Error):
            view.release()
        raise
    return Loading(view, event)


def save(client: Client, key: Key, tensor: "torch.Tensor", **how: Any) -> Optional[int]:
    """Writes a contiguous tensor of any device. Options and result are those of kvd.Client.put."""
    there = tensor.detach()
    if tensor.device.type != "cpu":
        if not tensor.is_contiguous():
            raise BufferError("the tensor is not contiguous")
        there = empty(client, tensor.shape, tensor.dtype)
        there.copy_(tensor)
    return client.put(key, there, **how)


def register(client: Client) -> bool:
    """Registers the arena with CUDA, until the client's end. False: there is no CUDA, or no arena.

    It takes all pages of the arena at once, and locks them.
    """
    address, length = client.arena()
    if length == 0 or not torch.cuda.is_available():
        return False
    runtime = torch.cuda.cudart()
    code = int(runtime.cudaHostRegister(address, length, 0))
    if code != 0:
        raise _errors.SystemFailure(f"cudaHostRegister answers {code}")
    client._core.at_end.append(lambda: runtime.cudaHostUnregister(address))
    return True


def _bytes(dtype: "torch.dtype") -> int:
    """Gives the bytes of an element."""
    size: int = torch.empty(0, dtype=dtype).element_size()
    return size
