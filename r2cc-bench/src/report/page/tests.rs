//! What the page must hold whatever the run's words are; how it looks is tested in a browser, in `tests/report_page.rs`.

use super::*;
use crate::check::sample::{record_01, suite_01};
use crate::suite::Timing;

fn report() -> Report {
    let (suite, record) = (suite_01(), record_01());
    let checks = evaluate(&suite, &record, Timing::Enforced);
    let summary = Summary::of_run(&suite, ScaleRow::Host, &record, checks, &RunContext::default());
    Report { summary, suite: Some(suite), stories: vec![Vec::new()] }
}

#[test]
fn words_of_a_run_cannot_leave_their_place_on_the_page() {
    let mut bad = report();
    bad.summary.suite = "</script><b>{{data}}{{script}}".into();
    bad.summary.ended_early = Some("<!-- </noscript> {{style}}".into());
    let (page, good) = (bad.page().unwrap(), report().page().unwrap());
    for tag in ["</script", "</noscript", "<b>", "<!--", "const DATA"] {
        assert_eq!(page.matches(tag).count(), good.matches(tag).count(), "{tag}");
    }
    let data = page.split_once("id=\"data\">").unwrap().1.split_once("</script>").unwrap().0;
    let data: serde_json::Value = serde_json::from_str(data).unwrap();
    assert_eq!(data["summary"]["suite"], "</script><b>{{data}}{{script}}");
}

#[test]
fn the_page_asks_for_nothing_outside_itself() {
    let page = report().page().unwrap();
    assert!(page.contains("default-src 'none'"));
    for word in ["<link", "src=", "@import", "url(", "fetch(", "https://"] {
        assert!(!page.contains(word), "{word}");
    }
}

#[test]
fn an_iteration_has_an_ideal_unless_a_fault_begins_within_it() {
    let ideals: Vec<Option<f64>> =
        report().summary.iterations.iter().map(|it| it.ideal_millis.map(f64::round)).collect();
    assert_eq!(ideals[..2], [Some(1600.0); 2]);
    assert_eq!(ideals[2], report().summary.hit_iteration.map(|hit| hit.ideal_millis.round()));
    assert_eq!(ideals[3..], [Some(2400.0); 7]);
}
