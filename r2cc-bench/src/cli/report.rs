//! `r2cc-bench report`: the HTML page of a recorded run.

use std::path::{Path, PathBuf};

use clap::Args;
use r2cc_bench::report::{ExitCode as Code, Report, ResultsFolder};

use super::{Complaint, complain, said};

/// Name of the page in the folder of its run.
pub(super) const PAGE: &str = "report.html";

#[derive(Args)]
pub(super) struct ReportArgs {
    /// Folder that a run wrote.
    folder: PathBuf,
    /// The page; default: report.html in that folder.
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
}

pub(super) fn report(args: &ReportArgs) -> Code {
    let file = args.out.clone().unwrap_or_else(|| args.folder.join(PAGE));
    match made(&args.folder, &file) {
        Ok(()) => said(file.display(), Code::Pass),
        Err((code, error)) => {
            complain(error);
            code
        }
    }
}

fn made(folder: &Path, file: &Path) -> Result<(), Complaint> {
    let page = page_of(folder)?;
    let name = file.file_name().and_then(|name| name.to_str());
    let name = name.ok_or_else(|| (Code::Usage, format!("--out {}: this names no file", file.display())))?;
    let place = file.parent().filter(|place| !place.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let place = ResultsFolder::open(place).map_err(|error| (Code::NotReady, error.to_string()))?;
    place.write(name, page.as_bytes()).map(drop).map_err(|error| (Code::NotReady, error.to_string()))
}

/// Writes the page of the run in `folder` beside its summary.
pub(super) fn write_page(folder: &ResultsFolder) -> Result<(), Complaint> {
    let page = page_of(folder.path())?;
    folder.write(PAGE, page.as_bytes()).map(drop).map_err(|error| (Code::NotReady, error.to_string()))
}

fn page_of(folder: &Path) -> Result<String, Complaint> {
    let report = Report::read(folder).map_err(|error| (Code::Usage, error.to_string()))?;
    report.page().map_err(|error| (Code::Internal, error.to_string()))
}
