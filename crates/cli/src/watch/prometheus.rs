//! The text format of exported metrics: Prometheus's, as far as OpenMetrics shares it.

/// One line: a name with labels, and a number.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Sample {
    pub(super) name: String,
    pub(super) labels: Vec<(String, String)>,
    pub(super) value: f64,
}

impl Sample {
    pub(super) fn label(&self, name: &str) -> Option<&str> {
        self.labels.iter().find(|(found, _)| found == name).map(|(_, value)| value.as_str())
    }
}

/// The samples whose names begin like this.
///
/// # Errors
///
/// The first line that isn't of this format.
pub(super) fn samples(text: &str, prefix: &str) -> Result<Vec<Sample>, String> {
    let mut samples = Vec::new();
    for (number, line) in (1..).zip(text.lines()) {
        let line = line.trim();
        if line.is_empty() || line.starts_with('#') {
            continue;
        }
        let sample = sample(line).ok_or_else(|| {
            let quoted: String = line.chars().take(40).collect();
            format!("expected Prometheus's text format, got {quoted:?} in line {number}")
        })?;
        if sample.name.starts_with(prefix) {
            samples.push(sample);
        }
    }
    Ok(samples)
}

fn sample(line: &str) -> Option<Sample> {
    let end = line.find(|character: char| !is_of_name(character)).unwrap_or(line.len());
    let (name, rest) = line.split_at(end);
    if name.is_empty() || name.starts_with(|first: char| first.is_ascii_digit()) {
        return None;
    }
    let (labels, rest) = match rest.strip_prefix('{') {
        Some(rest) => labels(rest)?,
        None => (Vec::new(), rest),
    };
    if !rest.starts_with([' ', '\t']) {
        return None;
    }
    // A time may follow the number; in OpenMetrics, an exemplar too.
    let mut words = rest.split_whitespace();
    let value = words.next()?.parse().ok()?;
    let after = words.next();
    let is_time = after.is_none_or(|word| word == "#" || word.parse::<f64>().is_ok());
    is_time.then(|| Sample { name: name.to_owned(), labels, value })
}

/// The labels between braces, and the rest of the line.
fn labels(mut rest: &str) -> Option<(Vec<(String, String)>, &str)> {
    let mut labels = Vec::new();
    loop {
        rest = rest.trim_start_matches([' ', ',']);
        if let Some(rest) = rest.strip_prefix('}') {
            return Some((labels, rest));
        }
        let (name, value) = rest.split_once('=')?;
        let name = name.trim();
        if name.is_empty() || !name.chars().all(is_of_name) {
            return None;
        }
        let (value, after) = quoted(value.trim_start().strip_prefix('"')?)?;
        labels.push((name.to_owned(), value));
        rest = after;
    }
}

/// A text up to its closing quote, without escapes, and what follows it.
fn quoted(text: &str) -> Option<(String, &str)> {
    let (mut value, mut characters) = (String::new(), text.char_indices());
    while let Some((at, character)) = characters.next() {
        match character {
            '"' => return Some((value, &text[at + 1..])),
            '\\' => match characters.next()?.1 {
                'n' => value.push('\n'),
                escaped => value.push(escaped),
            },
            _ => value.push(character),
        }
    }
    None
}

fn is_of_name(character: char) -> bool {
    character.is_ascii_alphanumeric() || character == '_' || character == ':'
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_labels_and_numbers_are_read_and_other_metrics_passed_over() {
        let text = "# HELP tollgate_x_total What\n# TYPE tollgate_x_total counter\n\
            tollgate_x_total{rule=\"a \\\"b\\\" \\\\ \\n{}\",outcome=\"allowed\"} 12 1700000000000\n\
            other_total 5\n\ntollgate_open 0\n tollgate_n{} +Inf\ntollgate_q{quantile=\"0.5\",} 1.5e-05 # {a=\"b\"} 1\n# EOF\n";
        let read = samples(text, "tollgate_").expect("metrics");
        let names: Vec<_> = read.iter().map(|sample| (sample.name.as_str(), sample.value)).collect();
        let expected = [("tollgate_x_total", 12.0), ("tollgate_open", 0.0), ("tollgate_n", f64::INFINITY)];
        assert_eq!(names[..3], expected);
        assert_eq!(names[3], ("tollgate_q", 1.5e-5));
        assert_eq!(read[0].label("rule"), Some("a \"b\" \\ \n{}"));
        assert_eq!((read[0].label("outcome"), read[0].label("source")), (Some("allowed"), None));
        assert_eq!(read[3].label("quantile"), Some("0.5"));
    }

    #[test]
    fn nonsense_is_an_error_that_names_the_line() {
        for (text, line) in [
            ("<!DOCTYPE html>\n<html>", 1),
            ("{\"a\": 1}", 1),
            ("up 1\nhello world", 2),
            ("up", 1),
            ("up{a=\"b\" 1", 1),
            ("up{a=\"b", 1),
            ("up{a} 1", 1),
            ("up{=\"b\"} 1", 1),
            ("up{a=b} 1", 1),
            ("up 1 2x", 1),
            ("9up 1", 1),
            ("up\u{7f}1 1", 1),
            ("up{\u{1f980}=\"\"} 1", 1),
            ("up{a=\"\\", 1),
        ] {
            let error = samples(text, "").expect_err(text);
            assert!(error.starts_with("expected Prometheus's text format, got "), "{error}");
            assert!(error.ends_with(&format!(" in line {line}")) && error.lines().count() == 1, "{error}");
        }
        let error = samples(&"x y".repeat(1 << 20), "").expect_err("a megabyte");
        assert!(error.len() < 120, "{error}");
    }
}
