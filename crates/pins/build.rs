//! Compiles the programs of `dmafile pins --record` for the kernel, with the feature `bpf`.

use std::env;
use std::path::Path;
use std::process::Command;

fn main() {
    let source = "bpf/record.bpf.c";
    println!("cargo::rerun-if-changed={source}");
    println!("cargo::rerun-if-env-changed=CLANG");
    if env::var_os("CARGO_FEATURE_BPF").is_none() {
        return;
    }
    let clang = env::var("CLANG").unwrap_or_else(|_| "clang".to_string());
    let folder = env::var_os("OUT_DIR").expect("cargo sets it");
    let object = Path::new(&folder).join("record.bpf.o");
    // -g: the kernel and the loader need the types.
    let flags = [
        "-target",
        "bpf",
        "-mcpu=v3",
        "-O2",
        "-g",
        "-fdebug-compilation-dir=.",
        "-Wall",
        "-Wextra",
        "-Werror",
        "-c",
    ];
    let machine = env::var("CARGO_CFG_TARGET_ARCH").expect("cargo sets it");
    let machine = if machine == "aarch64" {
        "-D__TARGET_ARCH_arm64"
    } else {
        "-D__TARGET_ARCH_x86"
    };
    let done = Command::new(&clang)
        .arg(machine)
        .args(flags)
        .arg(source)
        .arg("-o")
        .arg(&object)
        .status();
    match done {
        Ok(status) if status.success() => {}
        Ok(status) => panic!("{clang} {source}: {status}"),
        Err(error) => panic!(
            "the feature bpf needs clang (Debian: apt install clang; or set CLANG): {clang}: {error}"
        ),
    }
}
