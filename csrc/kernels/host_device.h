// HETKV_HOST_DEVICE marks a function that host code and kernels share.
#pragma once

#ifdef __CUDACC__
#define HETKV_HOST_DEVICE __host__ __device__
#else
#define HETKV_HOST_DEVICE
#endif
