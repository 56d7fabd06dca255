//! `dmafile doctor`

use crate::args::DoctorArgs;
use crate::output::{write_json, write_stdout};
use crate::text::columns;
use crate::{Failure, remote};
use dmafile::internal::one_line;
use serde_json::json;
use std::fmt::Write;
use std::path::Path;
use tabwriter::Alignment;

pub(crate) fn run(args: &DoctorArgs) -> Result<u8, Failure> {
    let url = remote::url(&args.path);
    let path = url.map_or(args.path.as_path(), |_| Path::new("."));
    let mut checks = dmafile_gpu::doctor(path)?;
    checks.retain(|check| url.is_none() || check.name != "file system");
    checks.extend(dmafile_hold::doctor());
    checks.extend(remote::doctor(url));
    let verdict = dmafile::verdict(&checks);
    if args.json {
        return write_json(&json!({ "checks": checks, "verdict": verdict }));
    }
    let mut table = String::new();
    for check in &checks {
        let (health, name) = (check.health, check.name);
        // Writing to a String does not fail.
        let _ = writeln!(table, "{health}\t{name}\t{}", one_line(&check.found));
        if let Some(remedy) = &check.remedy {
            let _ = writeln!(table, "\t\ttry: {}", one_line(remedy));
        }
    }
    let text = columns(&table, Alignment::Left) + "\n" + &one_line(&verdict) + "\n";
    write_stdout(text.as_bytes())
}
