// For functions that host code and kernels share; other compilers than nvcc know nothing of it. FLASHSDPA_DEVICE: where nvcc
// compiles it, for kernels alone.
#pragma once

#if defined(__CUDACC__)
#define FLASHSDPA_HOST_DEVICE __host__ __device__
#define FLASHSDPA_DEVICE __device__
#else
#define FLASHSDPA_HOST_DEVICE
#define FLASHSDPA_DEVICE
#endif
