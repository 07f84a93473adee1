// For functions that host code and kernels share: nvcc compiles them for both, other compilers know nothing of it.
#pragma once

#if defined(__CUDACC__)
#define FLASHSDPA_HOST_DEVICE __host__ __device__
#else
#define FLASHSDPA_HOST_DEVICE
#endif
