//! `dmafile doctor`

use crate::Failure;
use crate::args::DoctorArgs;
use crate::output::{write_json, write_stdout};
use serde_json::json;
use std::fmt::Write;

pub(crate) fn run(args: &DoctorArgs) -> Result<u8, Failure> {
    let checks = dmafile::doctor(&args.path)?;
    if args.json {
        return write_json(&json!({ "checks": checks }));
    }
    let width = checks
        .iter()
        .map(|check| check.name.len())
        .max()
        .unwrap_or(0);
    let mut text = String::new();
    for check in &checks {
        let (name, found) = (check.name, &check.found);
        // Writing to a String does not fail.
        let _ = writeln!(text, "{:<7}  {name:<width$}  {found}", check.health);
        if let Some(remedy) = &check.remedy {
            let _ = writeln!(text, "{:<7}  {:<width$}  try: {remedy}", "", "");
        }
    }
    write_stdout(text.as_bytes())
}
