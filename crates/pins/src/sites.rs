//! Purposes for which the kernel's functions pin memory.

/// The purpose of a function that pins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Site {
    /// Its name in tables.
    pub name: &'static str,
    /// True if it pins only for the duration of a transfer.
    pub is_short: bool,
}

/// Prefixes of function names.
const LONG: &[(&str, &[&str])] = &[
    (
        "io_uring buffer",
        &[
            "io_pin_pages",
            "io_sqe_buffer",
            "__io_sqe_buffer",
            "io_buffer_unmap",
            "io_release_ubuf",
            "io_rsrc_",
            "io_pages_",
            "io_free_region",
            "io_register_pbuf",
        ],
    ),
    (
        "udmabuf",
        &["udmabuf_", "release_udmabuf", "unpin_all_folios"],
    ),
    (
        "RDMA",
        &[
            "ib_umem_",
            "__ib_umem_",
            "siw_umem_",
            "hfi1_",
            "qib_",
            "usnic_",
            "mthca_map_user",
        ],
    ),
    (
        "VFIO",
        &[
            "vaddr_get_pfns",
            "vfio_",
            "put_pfn",
            "tce_iommu_",
            "pfn_reader_",
            "batch_unpin",
            "iopt_",
        ],
    ),
    ("AF_XDP", &["xdp_umem_", "xdp_put_umem"]),
    ("vDPA", &["vhost_vdpa_", "vduse_"]),
    (
        "video",
        &["vb2_", "get_vaddr_frames", "put_vaddr_frames", "videobuf_"],
    ),
    (
        "GPU",
        &["i915_gem_userptr", "etnaviv_gem_", "exynos_drm_", "g2d_"],
    ),
    ("SEV", &["sev_"]),
];
const SHORT: &[(&str, &[&str])] = &[
    (
        "direct I/O",
        &[
            "iov_iter_extract_",
            "bio_",
            "__bio_",
            "dio_",
            "__blockdev_direct_IO",
            "blk_rq_map_user",
            "netfs_",
            "fuse_",
            "cifs_",
            "smb",
        ],
    ),
    ("process_vm", &["process_vm_"]),
    ("crypto (AF_ALG)", &["af_alg_"]),
];

/// The purpose of a function, if known.
fn known(function: &str) -> Option<Site> {
    let search = |table: &[(&'static str, &[&str])], is_short| {
        let begins = |starts: &[&str]| starts.iter().any(|start| function.starts_with(start));
        let found = table.iter().find(|(_, starts)| begins(starts));
        found.map(|(name, _)| Site { name, is_short })
    };
    search(LONG, false).or_else(|| search(SHORT, true))
}

/// The purpose of a call stack, innermost function first.
pub(super) fn site<'a>(functions: impl IntoIterator<Item = &'a str>) -> Option<Site> {
    functions.into_iter().find_map(known)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_innermost_known_function_names_the_site() {
        let name = |functions: &[&str]| site(functions.iter().copied()).map(|site| site.name);
        assert_eq!(
            name(&["io_pin_pages", "io_sqe_buffer_register"]),
            Some("io_uring buffer")
        );
        // A direct read by io_uring.
        let read = [
            "iov_iter_extract_pages",
            "bio_iov_iter_get_pages",
            "io_read",
        ];
        assert_eq!(name(&read), Some("direct I/O"));
        assert!(site(read).unwrap().is_short);
        assert_eq!(name(&["drv_pin", "vfs_ioctl"]), None);
    }
}
