//! The command with what opens URLs, which the command without it starts for them.

use std::process::ExitCode;

fn main() -> ExitCode {
    dmafile_cli::run(std::env::args_os()).into()
}
