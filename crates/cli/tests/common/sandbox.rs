//! Sandboxes in which system calls are refused.

use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter,
    SeccompRule,
};
use std::collections::BTreeMap;
use std::io;
use std::os::unix::process::CommandExt;
use std::process::Command;

/// A system call is refused where this argument has all these bits.
#[derive(Clone, Copy)]
pub struct Call {
    pub number: i64,
    pub argument: u8,
    pub bits: u64,
}

/// A call with any arguments.
pub fn any(number: i64) -> [Call; 1] {
    [Call {
        number,
        argument: 0,
        bits: 0,
    }]
}

/// Calls that open with O_DIRECT.
pub fn open_direct() -> Vec<Call> {
    let call = |number, argument| Call {
        number,
        argument,
        bits: libc::O_DIRECT as u64,
    };
    vec![
        call(libc::SYS_openat, 2),
        #[cfg(target_arch = "x86_64")]
        call(libc::SYS_open, 1),
    ]
}

/// O_TMPFILE is refused, as on file systems without it.
pub fn no_nameless() -> Vec<Call> {
    // O_TMPFILE includes O_DIRECTORY, which other opens use too.
    let bits = (libc::O_TMPFILE & !libc::O_DIRECTORY) as u64;
    let number = libc::SYS_openat;
    vec![Call {
        number,
        argument: 2,
        bits,
    }]
}

fn filter(calls: &[Call], errno: i32) -> BpfProgram {
    let rule = |call: &Call| {
        let (length, op) = (SeccompCmpArgLen::Dword, SeccompCmpOp::MaskedEq(call.bits));
        let bits = SeccompCondition::new(call.argument, length, op, call.bits).unwrap();
        (call.number, vec![SeccompRule::new(vec![bits]).unwrap()])
    };
    compiled(calls.iter().map(rule).collect(), errno)
}

fn compiled(rules: BTreeMap<i64, Vec<SeccompRule>>, errno: i32) -> BpfProgram {
    SeccompFilter::new(
        rules,
        SeccompAction::Allow,
        SeccompAction::Errno(errno.try_into().unwrap()),
        std::env::consts::ARCH.try_into().unwrap(),
    )
    .unwrap()
    .try_into()
    .unwrap()
}

/// Makes these system calls of a command fail with `errno`.
pub fn refuse(command: Command, calls: &[Call], errno: i32) -> Command {
    apply(command, filter(calls, errno))
}

/// Like [`refuse`], for a call with this descriptor as its first argument.
pub fn refuse_on(command: Command, number: i64, fd: u64, errno: i32) -> Command {
    let length = SeccompCmpArgLen::Dword;
    let is_it = SeccompCondition::new(0, length, SeccompCmpOp::Eq, fd).unwrap();
    let rule = SeccompRule::new(vec![is_it]).unwrap();
    apply(command, compiled([(number, vec![rule])].into(), errno))
}

fn apply(mut command: Command, filter: BpfProgram) -> Command {
    let apply = move || seccompiler::apply_filter(&filter).map_err(|_| io::ErrorKind::Other.into());
    // SAFETY: the filter exists already; applying it is two system calls between fork and exec.
    unsafe { command.pre_exec(apply) };
    command
}
