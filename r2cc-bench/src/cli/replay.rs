//! `r2cc-bench replay`: a recorded run on the terminal, at the speed at which it ran or another.

use std::fs;
use std::io::IsTerminal;
use std::path::PathBuf;
use std::thread;
use std::time::{Duration, Instant};

use clap::Args;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use r2cc_bench::replay::{Scene, Tone, scenes};
use r2cc_bench::report::{ExitCode as Code, Paint};

use super::{complain, say};

/// Longest wait for something to happen, in the recorded run's own time: joining and checking are no sight.
const PAUSE_MAX: Duration = Duration::from_secs(3);

#[derive(Args)]
pub(super) struct ReplayArgs {
    /// Folder that a run wrote, or its run.jsonl.
    folder: PathBuf,
    /// How much faster than it ran: 1, 10, 0.5; `max` does not wait at all. Default: 1 on a terminal, max elsewhere.
    #[arg(long, value_name = "N", value_parser = speed)]
    speed: Option<f64>,
}

fn speed(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        _ if text == "max" => Ok(f64::INFINITY),
        Ok(speed) if speed > 0.0 && speed.is_finite() => Ok(speed),
        _ => Err("neither a number above 0 nor `max`".to_owned()),
    }
}

pub(super) fn replay(args: &ReplayArgs) -> Code {
    let file = if args.folder.is_dir() { args.folder.join("run.jsonl") } else { args.folder.clone() };
    let told = fs::read_to_string(&file).map_err(|error| {
        format!(
            "{}: cannot be read: {error}\n  hint: give the folder that a run wrote, with its run.jsonl",
            file.display()
        )
    });
    let told = told.and_then(|text| scenes(&text).map_err(|error| format!("{}: {error}", file.display())));
    match told {
        Ok(told) if told.is_empty() => {
            complain(format!("{}: it tells of nothing\n  hint: the bench was stopped at once", file.display()));
            Code::Usage
        }
        Ok(told) => show(&told, args.speed),
        Err(error) => {
            complain(error);
            Code::Usage
        }
    }
}

fn show(told: &[Scene], speed: Option<f64>) -> Code {
    let terminal = std::io::stdout().is_terminal();
    let speed = speed.unwrap_or(if terminal { 1.0 } else { f64::INFINITY });
    let paint = Paint::for_stdout();
    let bar = ProgressBar::with_draw_target(
        Some(1),
        match terminal && speed.is_finite() {
            true => ProgressDrawTarget::stdout(),
            false => ProgressDrawTarget::hidden(),
        },
    );
    if let Ok(style) = ProgressStyle::with_template("{wide_bar} {pos}/{len} iterations") {
        bar.set_style(style.progress_chars("=> "));
    }
    let first_ns = told.first().map_or(0, |scene| scene.at_ns);
    let mut before_ns = first_ns;
    let mut due = Instant::now();
    for scene in told {
        let pause = Duration::from_nanos(scene.at_ns - before_ns).min(PAUSE_MAX);
        before_ns = scene.at_ns;
        if speed.is_finite() {
            due += pause.div_f64(speed);
            thread::sleep(due.saturating_duration_since(Instant::now()));
        }
        let line = line(scene, first_ns, paint, width(terminal));
        let said = bar.suspend(|| say(line));
        if let Err(error) = said {
            complain(format!("standard output: {error}"));
            return Code::NotReady;
        }
        if let Some((done, of)) = scene.progress {
            bar.set_length(u64::from(of));
            bar.set_position(u64::from(done));
        }
    }
    bar.finish_and_clear();
    Code::Pass
}

/// Columns of the terminal; a pipe has no end of the line.
fn width(terminal: bool) -> usize {
    let size = terminal.then(|| console::Term::stdout().size_checked()).flatten();
    size.map_or(usize::MAX, |(_, columns)| usize::from(columns))
}

fn line(scene: &Scene, first_ns: u64, paint: Paint, width: usize) -> String {
    let (word, colour) = match scene.tone {
        Tone::Step => ("  ", 2),
        Tone::Work => ("  ", 0),
        Tone::Trouble => ("! ", 31),
        Tone::Relief => ("+ ", 32),
    };
    let seconds = (scene.at_ns - first_ns) as f64 / 1e9;
    let text = format!("{seconds:9.3} s {word}{}", scene.text);
    let cut = console::truncate_str(&text, width.saturating_sub(1).max(1), "…");
    paint.word(&cut, colour)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_says_without_colour_what_colour_repeats_and_fits_the_terminal() {
        let text = "rank 1: mlx5_2 to rank 2: live -> suspect".to_owned();
        let scene = Scene { at_ns: 2_500_000_000, tone: Tone::Trouble, text, progress: None };
        assert_eq!(
            line(&scene, 1_000_000_000, Paint::Plain, usize::MAX),
            "    1.500 s ! rank 1: mlx5_2 to rank 2: live -> suspect"
        );
        let narrow = line(&scene, 1_000_000_000, Paint::Plain, 30);
        assert_eq!(narrow.chars().count(), 29);
        assert!(narrow.ends_with('…'), "{narrow}");
        assert!(line(&scene, 0, Paint::Colour, 80).starts_with("\u{1b}[31m"));
    }

    #[test]
    fn a_speed_is_above_nothing() {
        assert_eq!((speed("10"), speed("0.5"), speed("max")), (Ok(10.0), Ok(0.5), Ok(f64::INFINITY)));
        for bad in ["0", "-1", "nan", "inf", "fast", ""] {
            assert!(speed(bad).is_err(), "{bad:?}");
        }
    }
}
