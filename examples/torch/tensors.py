"""An example: tensors of torch in the store, without copies. KVD_BROKER names the broker's socket.

It puts the tensors of a small model, and gets them back in three ways: into memory that the broker writes to itself, as
a look at the value where it is, and, if there is one, into the memory of a device.
"""

import kvd
import kvd.torch
import torch

LAYERS, SHAPE, DTYPE = 4, (512, 1024), torch.bfloat16

with kvd.Client() as client:
    pinned = kvd.torch.register(client)  # copies to a device are fast then; False: there is no device
    layers = []
    for i in range(LAYERS):
        layer = kvd.torch.empty(client, SHAPE, DTYPE)  # in the arena, which the broker reads: there is no copy
        layer.copy_(torch.randn(SHAPE))
        kvd.torch.save(client, f"layer:{i}", layer)
        layers.append(layer)

    # Into the arena: the READ of the store lands in the tensor.
    into = kvd.torch.empty(client, SHAPE, DTYPE)
    for i, layer in enumerate(layers):
        kvd.torch.load(client, f"layer:{i}", into)
        assert torch.equal(into, layer)
    print(f"{LAYERS} tensors of {into.numel() * into.element_size()} bytes, and none was copied here")

    # Where it is: no byte moves. Results count only if the view held.
    try:
        with client.get_view("layer:0") as view:
            looked = sum(len(part) for part in view.parts)
        print(f"a view of {looked} bytes held")
    except kvd.Unsupported as e:
        print("no views here:", e)

    # To a device.
    if torch.cuda.is_available():
        there = torch.empty(SHAPE, dtype=DTYPE, device="cuda")
        loading = kvd.torch.start_load(client, "layer:1", there)  # a view, copied on the device's stream
        loading.wait()  # ViewExpired: load it again
        assert torch.equal(there.cpu(), layers[1])
        kvd.torch.load(client, "layer:2", there)  # by the arena
        assert torch.equal(there.cpu(), layers[2])
        print(f"two tensors on {torch.cuda.get_device_name()}; the arena is {'' if pinned else 'not '}registered")
    else:
        print("no device here")
