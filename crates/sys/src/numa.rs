//! The NUMA node from which memory is allocated (getcpu(2), set_mempolicy(2)).

use super::host;

/// From linux/mempolicy.h; libc lacks it.
const MPOL_DEFAULT: libc::c_int = 0;
const MPOL_PREFERRED: libc::c_int = 1;
const MPOL_LOCAL: libc::c_int = 4;
/// Number of nodes that fit into a mask; Linux supports no more (CONFIG_NODES_SHIFT).
const NODES: usize = 1024;
const BITS: usize = libc::c_ulong::BITS as usize;

/// The node of the CPU that this thread runs on, from which its memory would be allocated. None if
/// only one node has memory, or if the thread has a memory policy (numactl(8)), which threads that
/// it starts inherit.
pub fn node() -> Option<u32> {
    let nodes = host::text("/sys/devices/system/node/has_memory")?;
    if !nodes.contains([',', '-']) || policy()? {
        return None;
    }
    let mut node: libc::c_uint = 0;
    // SAFETY: the kernel writes one number, which lives through the call; the others are null.
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

/// True if this thread has a memory policy.
fn policy() -> Option<bool> {
    let mut mode: libc::c_int = MPOL_DEFAULT;
    // SAFETY: the kernel writes one number, which lives through the call; no mask is requested.
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

/// Makes this thread allocate from that node from now on, as long as the node has memory. Only for
/// threads that we started: it lasts as long as they do.
///
/// Only advice: a sandbox may refuse the call, and memory is then allocated where the thread runs.
pub fn prefer(node: Option<u32>) {
    let Some(node) = node.map(|node| node as usize).filter(|node| *node < NODES) else {
        return;
    };
    let mut mask: [libc::c_ulong; NODES / BITS] = [0; NODES / BITS];
    mask[node / BITS] = 1 << (node % BITS);
    // SAFETY: the kernel reads as many bits as the mask has, which lives through the call; it
    // subtracts one from the number (set_mempolicy(2)).
    unsafe {
        libc::syscall(
            libc::SYS_set_mempolicy,
            MPOL_PREFERRED,
            mask.as_ptr(),
            NODES + 1,
        );
    }
}
