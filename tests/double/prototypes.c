/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * The prototypes that dmafile uses, compared with NVIDIA's header (include/cuda.h in the package
 * nvidia-cuda-runtime): this file only compiles if they match.
 */
#include <cuda.h>

#define SAME(f, ...) _Static_assert(__builtin_types_compatible_p(__typeof__(f), \
	__typeof__(CUresult(__VA_ARGS__))), #f)

SAME(cuInit, unsigned int);
SAME(cuDriverGetVersion, int *);
SAME(cuDeviceGetCount, int *);
SAME(cuDeviceGet, CUdevice *, int);
SAME(cuDeviceGetName, char *, int, CUdevice);
SAME(cuDeviceGetAttribute, int *, CUdevice_attribute, CUdevice);
SAME(cuDevicePrimaryCtxRetain, CUcontext *, CUdevice);
SAME(cuDevicePrimaryCtxRelease_v2, CUdevice);
SAME(cuCtxPushCurrent_v2, CUcontext);
SAME(cuCtxPopCurrent_v2, CUcontext *);
SAME(cuMemAlloc_v2, CUdeviceptr *, size_t);
SAME(cuMemFree_v2, CUdeviceptr);
SAME(cuMemHostRegister_v2, void *, size_t, unsigned int);
SAME(cuMemHostUnregister, void *);
SAME(cuMemcpyHtoDAsync_v2, CUdeviceptr, const void *, size_t, CUstream);
SAME(cuMemcpyDtoH_v2, void *, CUdeviceptr, size_t);
SAME(cuStreamCreate, CUstream *, unsigned int);
SAME(cuStreamDestroy_v2, CUstream);
SAME(cuStreamSynchronize, CUstream);
SAME(cuStreamWaitEvent, CUstream, CUevent, unsigned int);
SAME(cuEventCreate, CUevent *, unsigned int);
SAME(cuEventRecord, CUevent, CUstream);
SAME(cuEventQuery, CUevent);
SAME(cuEventSynchronize, CUevent);
SAME(cuEventDestroy_v2, CUevent);
SAME(cuGetErrorString, CUresult, const char **);

_Static_assert(sizeof(CUdeviceptr) == 8 && sizeof(CUdevice) == 4 && sizeof(CUresult) == 4, "sizes");
_Static_assert(CU_MEMHOSTREGISTER_PORTABLE == 1 && CU_MEMHOSTREGISTER_DEVICEMAP == 2 &&
	       CU_MEMHOSTREGISTER_READ_ONLY == 8, "flags of registration");
_Static_assert(CU_EVENT_BLOCKING_SYNC == 1 && CU_EVENT_DISABLE_TIMING == 2 &&
	       CU_STREAM_NON_BLOCKING == 1, "flags of events and streams");
_Static_assert(CU_DEVICE_ATTRIBUTE_READ_ONLY_HOST_REGISTER_SUPPORTED == 113 &&
	       CU_DEVICE_ATTRIBUTE_PCI_BUS_ID == 33 && CU_DEVICE_ATTRIBUTE_PCI_DEVICE_ID == 34 &&
	       CU_DEVICE_ATTRIBUTE_PCI_DOMAIN_ID == 50, "attributes");
_Static_assert(CUDA_ERROR_INVALID_VALUE == 1 && CUDA_ERROR_OUT_OF_MEMORY == 2 &&
	       CUDA_ERROR_NOT_INITIALIZED == 3 && CUDA_ERROR_NO_DEVICE == 100 &&
	       CUDA_ERROR_INVALID_DEVICE == 101 && CUDA_ERROR_NOT_READY == 600 &&
	       CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED == 712 && CUDA_ERROR_NOT_SUPPORTED == 801,
	       "errors");
