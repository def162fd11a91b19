"""One process per tensor-parallel rank: device, weights, the bytes of the KV pool, kernels, sampling."""
