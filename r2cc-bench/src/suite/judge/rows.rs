//! What the rows of a suite may get wrong among themselves.

use super::{Judge, Problem, suggestion};

impl Judge<'_> {
    pub(super) fn rows(mut self) -> Vec<Problem> {
        for (position, row) in self.suite.rows.iter().enumerate() {
            let step = position.to_string();
            let before = &self.suite.rows[..position];
            let plain = |c: char| c.is_ascii_alphanumeric() || "-_.=".contains(c);
            if row.name.is_empty() || !row.name.chars().all(plain) {
                let what = format!("`{}` cannot name a row", row.name);
                self.say(&["rows", &step, "name"], what, "use letters, digits, `-`, `_`, `.` and `=`");
            } else if before.iter().any(|other| other.name == row.name) {
                let hint = "each row of the table has its own name";
                self.say(&["rows", &step, "name"], format!("there are two rows `{}`", row.name), hint);
            }
            let Some(against) = &row.against else {
                let declares = row.library.as_ref().unwrap_or(&self.suite.library).failed.is_empty();
                if !declares {
                    let what = "a row that takes NICs for failed from the start has no healthy iterations";
                    self.say(&["rows", &step], what, "name a healthy row before it: `against: healthy`");
                }
                continue;
            };
            let names: Vec<String> =
                before.iter().filter(|row| row.against.is_none()).map(|row| row.name.clone()).collect();
            if !names.contains(against) {
                let what = format!("no row before this one has a baseline of its own and the name `{against}`");
                self.say(&["rows", &step, "against"], what, suggestion(against, &names));
            }
        }
        if self.suite.rows.is_empty() && !self.suite.library.failed.is_empty() {
            let what = "ranks that take NICs for failed from the start have no healthy iterations to compare with";
            self.say(&["library", "failed"], what, "make it a row `against` a healthy one: see suites/07.yaml");
        }
        self.problems
    }
}
