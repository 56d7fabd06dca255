//! See the library.

fn main() -> std::process::ExitCode {
    dmafile_cli::run(std::env::args_os()).into()
}
