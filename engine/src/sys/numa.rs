//! On which NUMA node memory comes into being (getcpu(2), set_mempolicy(2)).

use super::host;

/// Of linux/mempolicy.h, which libc has not.
const MPOL_DEFAULT: libc::c_int = 0;
const MPOL_PREFERRED: libc::c_int = 1;
const MPOL_LOCAL: libc::c_int = 4;
/// Nodes that a mask has room for; Linux has at most as many (CONFIG_NODES_SHIFT).
const NODES: usize = 1024;
const BITS: usize = libc::c_ulong::BITS as usize;

/// The node of the processor that this thread runs on, where its memory would come from. None where
/// there is but one with memory, or the thread has a policy of its own (numactl(8)), which threads
/// that it starts inherit.
pub(crate) fn node() -> Option<u32> {
    let nodes = host::text("/sys/devices/system/node/has_memory")?;
    if !nodes.contains([',', '-']) || policy()? {
        return None;
    }
    let mut node: libc::c_uint = 0;
    // SAFETY: the kernel writes one number, which lives through the call; the others are not asked
    // for.
    let failed = unsafe {
        libc::syscall(
            libc::SYS_getcpu,
            std::ptr::null_mut::<libc::c_uint>(),
            &raw mut node,
            std::ptr::null_mut::<libc::c_void>(),
        )
    };
    (failed == 0).then_some(node)
}

/// Whether this thread was given a policy.
fn policy() -> Option<bool> {
    let mut mode: libc::c_int = MPOL_DEFAULT;
    // SAFETY: the kernel writes one number, which lives through the call; no mask is asked for.
    let failed = unsafe {
        libc::syscall(
            libc::SYS_get_mempolicy,
            &raw mut mode,
            std::ptr::null_mut::<libc::c_ulong>(),
            0_usize,
            std::ptr::null_mut::<libc::c_void>(),
            0_usize,
        )
    };
    (failed == 0).then_some(!matches!(mode, MPOL_DEFAULT | MPOL_LOCAL))
}

/// What this thread allocates from now on comes from that node, as long as it has memory. For
/// threads of our own only: it lasts as long as they do.
///
/// Advice: a sandbox may refuse the call, and memory then comes from where the thread runs.
pub(crate) fn prefer(node: Option<u32>) {
    let Some(node) = node.map(|node| node as usize).filter(|node| *node < NODES) else {
        return;
    };
    let mut mask: [libc::c_ulong; NODES / BITS] = [0; NODES / BITS];
    mask[node / BITS] = 1 << (node % BITS);
    // SAFETY: the kernel reads as many bits as the mask has, which lives through the call; it takes
    // one off the number (set_mempolicy(2)).
    unsafe {
        libc::syscall(
            libc::SYS_set_mempolicy,
            MPOL_PREFERRED,
            mask.as_ptr(),
            NODES + 1,
        );
    }
}
