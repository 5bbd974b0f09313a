//! The HTML page of a run, read in a browser: every number on it is that of `summary.json`, every bar as tall as its
//! figure, nothing is fetched, and nothing sticks out of a wide or a narrow page. Needs Chromium (`make packages`).
#![allow(clippy::unwrap_used, reason = "a test panics where it fails")]

mod support;

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use r2cc_bench::report::{Event, EventLine};
use serde::Deserialize;
use serde_json::{Value, json};
use support::{SmallSuite, bench};

/// What the browser shows, collected there after the page has drawn itself.
#[derive(Debug, Deserialize)]
struct Shown {
    /// Expression, format and text of each number.
    figures: Vec<(String, String, String)>,
    /// Pointer and text of each wording.
    words: Vec<(String, String)>,
    /// Texts with digits that say nothing of where they come from.
    loose: Vec<String>,
    /// Expression, pixels a unit and height of each bar.
    bars: Vec<(String, f64, f64)>,
    /// Elements that stick out of the page.
    outside: Vec<String>,
    /// What the page fetched.
    fetched: Vec<String>,
    errors: Vec<String>,
    tips: usize,
}

const COLLECTOR: &str = r#"<script>
const collected = { figures: [], words: [], loose: [], bars: [], outside: [], tips: 0, errors: window.errors };
function gather(root) {
  root.querySelectorAll('[data-as]').forEach((e) => collected.figures.push([e.dataset.at, e.dataset.as, e.textContent]));
  root.querySelectorAll('[data-text]').forEach((e) => collected.words.push([e.dataset.text, e.textContent]));
  const walker = document.createTreeWalker(root, NodeFilter.SHOW_TEXT);
  for (let node = walker.nextNode(); node; node = walker.nextNode()) {
    if (/\d/.test(node.data) && !node.parentElement.closest('[data-as], [data-text], .axis')) collected.loose.push(node.data);
  }
}
function look() {
  const page = document.getElementById('page');
  document.querySelectorAll('details').forEach((one) => { one.open = true; });
  gather(page);
  page.querySelectorAll('[data-scale] [data-at]').forEach((bar) => collected.bars.push(
    [bar.dataset.at, Number(bar.closest('[data-scale]').dataset.scale), Number(bar.getAttribute('height'))]));
  const right = document.documentElement.getBoundingClientRect().right;
  page.querySelectorAll('*').forEach((e) => {
    if (e.getBoundingClientRect().right > right + 1 && !e.closest('.scroll')) collected.outside.push(e.outerHTML.slice(0, 120));
  });
  page.querySelectorAll('[data-tip]').forEach((owner) => {
    owner.dispatchEvent(new PointerEvent('pointermove', { bubbles: true, clientX: 5, clientY: 5 }));
    collected.tips += 1;
    gather(document.getElementById('tip'));
  });
}
look();
[...document.querySelectorAll('button[aria-pressed=false]')].map((button) => button.textContent).forEach((name) => {
  [...document.querySelectorAll('button')].find((button) => button.textContent === name).click();
  look();
});
collected.fetched = performance.getEntriesByType('resource').map((entry) => entry.name);
document.body.append(Object.assign(document.createElement('script'), { type: 'application/json', id: 'shown',
  textContent: JSON.stringify(collected).replaceAll('<', '\\u003c') }));
</script></body>"#;

/// Opens the page in a browser `width` pixels wide and returns what it shows.
fn look(page: &Path, width: u32, dark: bool) -> Shown {
    let text = fs::read_to_string(page).unwrap();
    // Windows of a headless browser have a least width; the page itself may be narrower.
    let text = text
        .replace("</style>", &format!("html {{ width: {width}px }}</style>"))
        .replace("<main", "<script>window.errors = []; onerror = (what) => errors.push(String(what));</script><main")
        .replace("</body>", COLLECTOR);
    let place = tempfile::tempdir().unwrap();
    let copy = place.path().join("page.html");
    fs::write(&copy, text).unwrap();
    let browser = ["chromium", "chromium-browser", "google-chrome"]
        .into_iter()
        .find(|name| Command::new(name).arg("--version").stdout(Stdio::null()).stderr(Stdio::null()).status().is_ok());
    let output = Command::new(browser.expect("no Chromium on this machine: run `make packages`"))
        .args(["--headless", "--no-sandbox", "--disable-gpu", "--dump-dom", "--virtual-time-budget=2000"])
        .arg(format!("--user-data-dir={}", place.path().join("profile").display()))
        .arg(format!("--window-size={},900", width.max(500)))
        .arg(format!("--blink-settings=preferredColorScheme={}", u8::from(!dark)))
        .arg(format!("file://{}", copy.display()))
        .stdin(Stdio::null())
        .output()
        .unwrap();
    let dom = String::from_utf8(output.stdout).unwrap();
    let collected = dom.split_once("id=\"shown\">").unwrap_or_else(|| panic!("nothing was collected: {dom:.2000}")).1;
    serde_json::from_str(collected.split_once("</script>").unwrap().0).unwrap()
}

/// The data as the run's own files hold them.
fn recorded(folder: &Path) -> Value {
    let summary: Value = serde_json::from_str(&fs::read_to_string(folder.join("summary.json")).unwrap()).unwrap();
    let (mut suite, mut stories) = (Value::Null, Vec::<Vec<Value>>::new());
    for line in fs::read_to_string(folder.join("run.jsonl")).unwrap_or_default().lines() {
        let raw: Value = serde_json::from_str(line).unwrap();
        match serde_json::from_str::<EventLine>(line).unwrap().event {
            Event::Started { .. } => {
                suite = raw["event"]["started"]["suite"].clone();
                stories.push(Vec::new());
            }
            Event::Transition(_) => stories.last_mut().unwrap().push(raw["event"]["transition"].clone()),
            _ => {}
        }
    }
    json!({"summary": summary, "suite": suite, "stories": stories})
}

fn found(data: &Value, pointer: &str) -> Vec<Value> {
    let (path, wanted) = pointer.split_once('?').map_or((pointer, None), |(path, wanted)| (path, Some(wanted)));
    let (before, after) = path.split_once("/*").unwrap_or((path, ""));
    let at = data.pointer(before).cloned().unwrap_or_default();
    let entries: Vec<Value> = match (path.contains("/*"), at) {
        (false, at) => vec![at],
        (true, Value::Array(entries)) => entries,
        (true, Value::Object(entries)) => entries.into_iter().map(|(_, entry)| entry).collect(),
        (true, _) => vec![],
    };
    let kept = entries.iter().filter(|entry| wanted.is_none_or(|name| entry[name].as_f64().is_some_and(|n| n != 0.0)));
    kept.filter_map(|entry| entry.pointer(after)).filter(|at| !at.is_null()).cloned().collect()
}

/// The number that an expression of the page stands for.
fn figure(data: &Value, expression: &str) -> Option<f64> {
    let Some((operation, arguments)) = expression.split_once(':') else {
        return found(data, expression).first()?.as_f64();
    };
    let (first, second) = arguments.split_once('|').unwrap_or((arguments, ""));
    let entries = found(data, first);
    let numbers: Vec<f64> = entries.iter().filter_map(Value::as_f64).collect();
    let other = || figure(data, second);
    match operation {
        "sum" => Some(numbers.iter().sum()),
        "max" => numbers.into_iter().reduce(f64::max),
        "count" => Some(entries.len() as f64),
        "ratio" => Some(numbers.first()? / other()?),
        "percent" => Some(100.0 * numbers.first()? / other()?),
        "times" => Some(numbers.first()? * other()?),
        "since" => Some((numbers.first()? - other()?) / 1e6),
        _ => panic!("{expression}: no such operation"),
    }
}

fn expect_figure(data: &Value, (expression, format, text): &(String, String, String)) {
    let Some(number) = figure(data, expression) else {
        assert_eq!(text, "–", "{expression} is not in the data");
        return;
    };
    let (unit, digits) = format.split_at(1);
    let scaled = match unit {
        "f" => number,
        "m" => number / f64::from(1 << 20),
        "s" => number / 1e3,
        "g" => number / 1e6,
        _ => panic!("{format}: no such unit"),
    };
    let digits: i32 = digits.parse().unwrap();
    let read: f64 =
        text.replace(',', "").replace('−', "-").parse().unwrap_or_else(|_| panic!("{expression}: {text:?}"));
    assert!((read - scaled).abs() <= 0.5 * 10f64.powi(-digits) * (1.0 + 1e-6), "{expression}: {text:?} for {scaled}");
    let decimals = text.split_once('.').map_or(0, |(_, decimals)| decimals.len());
    assert_eq!(decimals as i32, digits, "{expression}: {text:?}");
}

fn expect_page(folder: &Path, page: &Path, width: u32, dark: bool) -> Shown {
    let data = recorded(folder);
    let shown = look(page, width, dark);
    assert_eq!(shown.errors, [""; 0]);
    assert_eq!(shown.loose, [""; 0], "numbers that name no source");
    assert_eq!(shown.outside, [""; 0], "at {width} pixels");
    assert_eq!(shown.fetched, [""; 0]);
    for shown in &shown.figures {
        expect_figure(&data, shown);
    }
    for (pointer, text) in &shown.words {
        assert_eq!(data.pointer(pointer).and_then(Value::as_str), Some(text.as_str()), "{pointer}");
    }
    for (expression, scale, height) in &shown.bars {
        let tall = figure(&data, expression).unwrap_or(0.0) * scale;
        assert!((tall - height).abs() < 0.01, "{expression}: {height} pixels for {tall}");
    }
    shown
}

fn recorded_run(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../reference-logs").join(name)
}

fn page_of(folder: &Path, place: &Path) -> PathBuf {
    let page = place.join("report.html");
    bench(&["report", folder.to_str().unwrap(), "--out", page.to_str().unwrap()]).expect_code(0);
    page
}

/// What a reader must find in any case: each iteration's time and each NIC's bytes.
fn expect_covered(folder: &Path, shown: &Shown) {
    let data = recorded(folder);
    let seen: BTreeSet<&str> = shown.figures.iter().map(|(expression, ..)| expression.as_str()).collect();
    let bars: BTreeSet<&str> = shown.bars.iter().map(|(expression, ..)| expression.as_str()).collect();
    let base = if data["summary"]["runs"].is_array() { "/summary/runs/0" } else { "/summary" };
    let iterations = data.pointer(base).unwrap()["iterations"].as_array().unwrap();
    assert!(!iterations.is_empty());
    for (i, iteration) in iterations.iter().enumerate() {
        assert!(seen.contains(format!("{base}/iterations/{i}/millis").as_str()));
        for (node, nics) in iteration["nics"].as_object().unwrap() {
            for nic in nics.as_object().unwrap().keys().filter(|nic| *nic != "mgmt0") {
                let bytes = format!("{base}/iterations/{i}/nics/{node}/{nic}/passed_rx_bytes");
                assert!(seen.contains(bytes.as_str()) && bars.contains(bytes.as_str()), "{bytes}");
            }
        }
    }
    assert!(shown.tips > iterations.len());
}

#[test]
fn every_number_on_the_page_is_that_of_the_summary() {
    let place = tempfile::tempdir().unwrap();
    for name in ["emulated/01", "emulated/01-ten-runs", "h200-emulated/01", "h200-emulated/01-none"] {
        let folder = recorded_run(name);
        let page = page_of(&folder, place.path());
        expect_covered(&folder, &expect_page(&folder, &page, 1280, false));
    }
}

#[test]
fn a_narrow_and_a_dark_page_hold_everything() {
    let place = tempfile::tempdir().unwrap();
    let folder = recorded_run("emulated/01");
    let page = page_of(&folder, place.path());
    for (width, dark) in [(360, false), (1280, true), (2400, false)] {
        expect_covered(&folder, &expect_page(&folder, &page, width, dark));
    }
}

#[test]
fn a_number_that_differs_is_noticed() {
    let data = json!({"summary": {"a": 1.25, "b": [2, 3]}});
    let shown =
        |expression: &str, format: &str, text: &str| (expression.to_owned(), format.to_owned(), text.to_owned());
    let good = [
        shown("/summary/a", "f1", "1.3"),
        shown("/summary/a", "f2", "1.25"),
        shown("sum:/summary/b/*", "f0", "5"),
        shown("ratio:/summary/b/0|/summary/a", "f3", "1.600"),
        shown("/summary/c", "f1", "–"),
    ];
    good.iter().for_each(|shown| expect_figure(&data, shown));
    for bad in [
        shown("/summary/a", "f2", "1.24"),
        shown("/summary/a", "f2", "1.2"),
        shown("/summary/a", "f1", "–"),
        shown("/summary/c", "f1", "0.0"),
        shown("sum:/summary/b/*", "f0", "6"),
    ] {
        assert!(std::panic::catch_unwind(|| expect_figure(&data, &bad)).is_err(), "{bad:?}");
    }
}

#[test]
fn a_run_writes_its_page_and_a_failed_one_shows_what_is_wrong() {
    let place = tempfile::tempdir().unwrap();
    let (file, out) = (SmallSuite::default().write(place.path()), place.path().join("out"));
    bench(&["run", file.to_str().unwrap(), "--corrupt", "3", "--out", out.to_str().unwrap()]).expect_code(2);
    let shown = expect_page(&out, &out.join("report.html"), 1280, false);
    expect_covered(&out, &shown);
    assert!(shown.words.iter().any(|(_, text)| text.contains("first on rank")), "{:#?}", shown.words);

    // A bench that was killed leaves its events alone.
    let killed = place.path().join("killed");
    fs::create_dir(&killed).unwrap();
    let events = fs::read_to_string(out.join("run.jsonl")).unwrap();
    let cut = events.lines().take_while(|line| !line.contains("\"ended\"")).collect::<Vec<_>>().join("\n");
    fs::write(killed.join("run.jsonl"), format!("{cut}\n{{\"version\":1,\"at_ns")).unwrap();
    let page = fs::read_to_string(page_of(&killed, place.path())).unwrap();
    assert!(page.contains("the bench ended before it gave a verdict"));
    assert!(!killed.join("summary.json").exists(), "a report is no verdict");
}

#[test]
fn a_folder_without_a_run_is_exit_64() {
    let place = tempfile::tempdir().unwrap();
    let folder = place.path().to_str().unwrap();
    bench(&["report", folder]).expect_code(64).expect_words(&["summary.json: cannot be read", "hint:"]);
    fs::write(place.path().join("summary.json"), "{}").unwrap();
    bench(&["report", folder]).expect_code(64).expect_words(&["summary.json: missing field", "hint:"]);
    fs::remove_file(place.path().join("summary.json")).unwrap();
    fs::write(place.path().join("run.jsonl"), "nonsense\n").unwrap();
    bench(&["report", folder]).expect_code(64).expect_words(&["run.jsonl:1:"]);
    fs::write(place.path().join("run.jsonl"), "").unwrap();
    bench(&["report", folder]).expect_code(64).expect_words(&["tells of no run", "hint:"]);
    assert!(!place.path().join("report.html").exists());
}
