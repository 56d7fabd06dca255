/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * The prototypes that dmafile uses, compared with AMD's header (include/hip/hip_runtime_api.h in Debian's
 * package libamdhip64-dev): this file only compiles if they match.
 */
#define __HIP_PLATFORM_AMD__
#include <hip/hip_runtime_api.h>

#define IS(f, ...) __builtin_types_compatible_p(__typeof__(f), __typeof__(hipError_t(__VA_ARGS__)))
#define SAME(f, ...) _Static_assert(IS(f, __VA_ARGS__), #f)

SAME(hipInit, unsigned int);
SAME(hipDriverGetVersion, int *);
SAME(hipGetDeviceCount, int *);
SAME(hipDeviceGet, hipDevice_t *, int);
SAME(hipDeviceGetName, char *, int, hipDevice_t);
SAME(hipDeviceGetAttribute, int *, hipDeviceAttribute_t, int);
SAME(hipDevicePrimaryCtxRetain, hipCtx_t *, hipDevice_t);
SAME(hipDevicePrimaryCtxRelease, hipDevice_t);
SAME(hipCtxPushCurrent, hipCtx_t);
SAME(hipCtxPopCurrent, hipCtx_t *);
SAME(hipMalloc, void **, size_t);
SAME(hipFree, void *);
SAME(hipHostRegister, void *, size_t, unsigned int);
SAME(hipHostUnregister, void *);
SAME(hipMemcpyDtoH, void *, hipDeviceptr_t, size_t);
SAME(hipStreamCreateWithFlags, hipStream_t *, unsigned int);
SAME(hipStreamDestroy, hipStream_t);
SAME(hipStreamSynchronize, hipStream_t);
SAME(hipStreamWaitEvent, hipStream_t, hipEvent_t, unsigned int);
SAME(hipEventCreateWithFlags, hipEvent_t *, unsigned int);
SAME(hipEventRecord, hipEvent_t, hipStream_t);
SAME(hipEventQuery, hipEvent_t);
SAME(hipEventSynchronize, hipEvent_t);
SAME(hipEventDestroy, hipEvent_t);

/* Older headers forget that the source is const. */
_Static_assert(IS(hipMemcpyHtoDAsync, hipDeviceptr_t, const void *, size_t, hipStream_t) ||
	       IS(hipMemcpyHtoDAsync, hipDeviceptr_t, void *, size_t, hipStream_t), "hipMemcpyHtoDAsync");
/* Debian 12's header is older than this function. */
#if HIP_VERSION_MAJOR * 100 + HIP_VERSION_MINOR >= 507
SAME(hipDrvGetErrorString, hipError_t, const char **);
#endif

_Static_assert(sizeof(hipDeviceptr_t) == 8 && sizeof(hipDevice_t) == 4 && sizeof(hipError_t) == 4, "sizes");
_Static_assert(hipHostRegisterPortable == 1 && hipExtHostRegisterCoarseGrained == 8, "flags of registration");
_Static_assert(hipEventBlockingSync == 1 && hipEventDisableTiming == 2 && hipStreamNonBlocking == 1,
	       "flags of events and streams");
_Static_assert(hipErrorInvalidValue == 1 && hipErrorOutOfMemory == 2 && hipErrorNotInitialized == 3 &&
	       hipErrorDeinitialized == 4 && hipErrorNoDevice == 100 && hipErrorInvalidDevice == 101 &&
	       hipErrorNotReady == 600 && hipErrorHostMemoryAlreadyRegistered == 712 &&
	       hipErrorHostMemoryNotRegistered == 713 && hipErrorNotSupported == 801, "errors");
