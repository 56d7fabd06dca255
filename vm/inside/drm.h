/* Of drm/drm.h what finds a driver and hands it a dma-buf; the header itself is in a package of its own. */
#ifndef DRM_H
#define DRM_H

#include <linux/ioctl.h>
#include <stddef.h>
#include <stdint.h>

struct drm_version {
	int	version_major, version_minor, version_patchlevel;
	size_t	name_len;
	char	*name;
	size_t	date_len;
	char	*date;
	size_t	desc_len;
	char	*desc;
};

struct drm_gem_close {
	uint32_t	handle, pad;
};

struct drm_prime_handle {
	uint32_t	handle, flags;
	int32_t		fd;
};

#define DRM_IOCTL_VERSION		_IOWR('d', 0x00, struct drm_version)
#define DRM_IOCTL_GEM_CLOSE		_IOW('d', 0x09, struct drm_gem_close)
#define DRM_IOCTL_PRIME_HANDLE_TO_FD	_IOWR('d', 0x2d, struct drm_prime_handle)
#define DRM_IOCTL_PRIME_FD_TO_HANDLE	_IOWR('d', 0x2e, struct drm_prime_handle)

#endif
