"""An example: an array of numpy goes to the store, and comes back without a copy. KVD_BROKER names the broker's socket."""

import kvd
import numpy

with kvd.Client() as client:
    client.put("weights", numpy.arange(6, dtype="float32").reshape(2, 3))
    weights = client.alloc((2, 3), "float32")  # memory that the broker writes to itself
    client.get_into("weights", weights)
    print(weights)
