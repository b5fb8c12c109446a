// HETKV_HOST_DEVICE marks an inline function that host code and kernels share.
#pragma once

#ifdef __CUDACC__
#define HETKV_HOST_DEVICE __host__ __device__
#elif defined(HETKV_LEVEL)
// Compiled once per instruction set: a copy that is not inlined could be the one that all levels are linked with.
#define HETKV_HOST_DEVICE __attribute__((always_inline))
#else
#define HETKV_HOST_DEVICE
#endif
