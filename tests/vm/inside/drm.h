/* The parts of drm/drm.h that find a driver and import a dma-buf; the header itself is in a separate package. */
#ifndef DRM_H
#define DRM_H

#include <fcntl.h>
#include <linux/ioctl.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/ioctl.h>
#include <unistd.h>

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

struct drm_mode_create_dumb {
	uint32_t	height, width, bpp, flags, handle, pitch;
	uint64_t	size;
};

#define DRM_IOCTL_VERSION		_IOWR('d', 0x00, struct drm_version)
#define DRM_IOCTL_GEM_CLOSE		_IOW('d', 0x09, struct drm_gem_close)
#define DRM_IOCTL_PRIME_HANDLE_TO_FD	_IOWR('d', 0x2d, struct drm_prime_handle)
#define DRM_IOCTL_PRIME_FD_TO_HANDLE	_IOWR('d', 0x2e, struct drm_prime_handle)
#define DRM_IOCTL_MODE_CREATE_DUMB	_IOWR('d', 0xb2, struct drm_mode_create_dumb)

/* Opens the first node of this driver, because /dev/dri/card0 may belong to another one; -1 if there is none. */
static inline int drm_open(const char *driver)
{
	for (int number = 0; number < 8; number++) {
		char path[32], name[32] = "";
		struct drm_version version = { .name = name, .name_len = sizeof(name) - 1 };
		int fd;

		snprintf(path, sizeof(path), "/dev/dri/card%d", number);
		fd = open(path, O_RDWR | O_CLOEXEC);
		if (fd < 0)
			continue;
		if (!ioctl(fd, DRM_IOCTL_VERSION, &version) && !strcmp(name, driver))
			return fd;
		close(fd);
	}
	return -1;
}

#endif
