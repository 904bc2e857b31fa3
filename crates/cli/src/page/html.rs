//! A page as HTML, which is well-formed XML too.

use std::fmt::Write;

use anyhow::Result;
use jiff::Timestamp;

use super::draw::{self, Ground};
use super::plot::{Ink, Plot};
use super::text::{LONGEST, escaped, printable, shortened};
use super::{Page, Section};

/// Nothing is fetched and no script runs, whatever the page's texts are.
const POLICY: &str = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'";

const STYLE: &str = include_str!("style.css");

/// More rows than this are not printed.
const MOST_ROWS: usize = 500;

pub(super) fn page(page: &Page) -> Result<String> {
    let (title, says) = (text(&page.title), text(&page.says));
    let mut html = format!(
        "<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\"/>\n\
         <meta http-equiv=\"Content-Security-Policy\" content=\"{POLICY}\"/>\n\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\"/>\n\
         <meta name=\"color-scheme\" content=\"light dark\"/>\n\
         <title>{title}</title>\n<style>\n{STYLE}</style>\n</head>\n<body>\n{}\
         <header>\n<h1>{title}</h1>\n<p class=\"says\">{says}</p>\n</header>\n<main>\n",
        draw::patterns(),
    );
    if !page.facts.is_empty() {
        html += "<section class=\"facts\" aria-labelledby=\"facts\">\n<h2 id=\"facts\">In numbers</h2>\n<dl>\n";
        for (name, value) in &page.facts {
            writeln!(html, "<div><dt>{}</dt><dd>{}</dd></div>", text(name), short(value))?;
        }
        html += "</dl>\n</section>\n";
    }
    for (at, section) in page.sections.iter().enumerate() {
        html += &self::section(section, &format!("part-{}", at + 1))?;
    }
    let (version, now) = (env!("CARGO_PKG_VERSION"), Timestamp::now());
    writeln!(html, "</main>\n<footer><p>Made by tollgate {version} at {now:.0}.</p></footer>\n</body>\n</html>")?;
    Ok(html)
}

fn section(section: &Section, id: &str) -> Result<String> {
    let (title, says) = (text(&section.title), text(&section.says));
    let mut html =
        format!("<section aria-labelledby=\"{id}\">\n<h2 id=\"{id}\">{title}</h2>\n<p id=\"{id}-says\">{says}</p>\n");
    if let Some(plot) = &section.plot {
        html += &figure(plot, id)?;
    }
    if !section.table.rows.is_empty() {
        html += &table(section, &title, id)?;
    }
    Ok(html + "</section>\n")
}

/// The plot for a wide and for a narrow screen, of which one is visible.
fn figure(plot: &Plot, id: &str) -> Result<String> {
    let mut html = format!("<figure aria-labelledby=\"{id}\">\n<ul class=\"legend\">\n");
    for (name, ink) in plot.legend() {
        writeln!(html, "<li>{}{}</li>", swatch(ink, plot), text(name))?;
    }
    html += "</ul>\n";
    for (ground, class) in [(Ground::Wide, "wide"), (Ground::Narrow, "narrow")] {
        let drawn = draw::draw(plot, ground)?;
        let named = format!("role=\"img\" aria-labelledby=\"{id}\" aria-describedby=\"{id}-says\"");
        // Its size is that of its container.
        let (_, rest) = drawn.split_once(" viewBox").unwrap_or_default();
        write!(html, "<svg class=\"{class}\" {named} viewBox{rest}")?;
    }
    Ok(html + "</figure>\n")
}

fn swatch(ink: Ink, plot: &Plot) -> String {
    let colour = draw::hex(ink.colour());
    let shape = match plot {
        Plot::Columns(_) | Plot::Bars(_) => format!("<rect width=\"16\" height=\"12\" fill=\"{colour}\"/>"),
        Plot::Lines(_) => format!("<path d=\"M0 6H24\" fill=\"none\" stroke=\"{colour}\" stroke-width=\"2\"/>"),
        Plot::Points(_) if ink == Ink::Denied => {
            format!("<circle cx=\"8\" cy=\"6\" r=\"5\" fill=\"none\" stroke=\"{colour}\" stroke-width=\"3\"/>")
        }
        Plot::Points(_) => format!("<circle cx=\"8\" cy=\"6\" r=\"4\" fill=\"{colour}\"/>"),
    };
    format!("<svg class=\"swatch\" aria-hidden=\"true\" viewBox=\"0 0 24 12\">{shape}</svg>")
}

fn table(section: &Section, title: &str, id: &str) -> Result<String> {
    let (label, table) = (format!("Table: {title}"), &section.table);
    // Below a plot, it is closed at first.
    let open = if section.plot.is_none() { " open" } else { "" };
    let mut html = format!(
        "<details{open}>\n<summary>The numbers as a table</summary>\n\
         <div class=\"scroll\" role=\"region\" aria-label=\"{label}\" tabindex=\"0\">\n\
         <table id=\"{id}-table\">\n<caption>{title}</caption>\n<thead><tr>"
    );
    for head in &table.heads {
        write!(html, "<th scope=\"col\">{}</th>", text(head))?;
    }
    html += "</tr></thead>\n<tbody>\n";
    for row in table.rows.iter().take(MOST_ROWS) {
        html += "<tr>";
        for (at, cell) in row.iter().enumerate() {
            let cell = short(cell);
            if at == 0 {
                write!(html, "<th scope=\"row\">{cell}</th>")?;
            } else {
                write!(html, "<td>{cell}</td>")?;
            }
        }
        html += "</tr>\n";
    }
    html += "</tbody>\n</table>\n</div>\n";
    if let more @ 1.. = table.rows.len().saturating_sub(MOST_ROWS) {
        writeln!(html, "<p>{more} more rows are left out.</p>")?;
    }
    Ok(html + "</details>\n")
}

/// A text of the page itself, or one that is known to be short.
fn text(text: &str) -> String {
    escaped(&printable(text))
}

/// A text of any length.
fn short(text: &str) -> String {
    // Escapes make text longer, so it is shortened again.
    escaped(&shortened(&printable(&shortened(text, LONGEST)), 2 * LONGEST))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::page::Table;
    use crate::page::plot::{Bars, Columns, Line, Lines, Mark, Measure, Point, Points, Series};

    const HOSTILE: &str = "<script>alert(1)</script>\"'&]]>--\u{202e}\0\u{1b}\u{ffff}<!-- </style>";

    /// A page with one of everything, all with hostile texts.
    fn hostile() -> Page {
        let text = || HOSTILE.to_owned();
        let series = vec![
            Series { name: text(), ink: Ink::Allowed, counts: vec![3, 0, u64::MAX >> 12] },
            Series { name: text(), ink: Ink::Denied, counts: vec![0, 1, 5] },
        ];
        let columns = Columns {
            edges: vec![text(); 4],
            across: text(),
            up: text(),
            series: series.clone(),
            marks: vec![Mark { at: 1.5, name: text() }],
            top: None,
        };
        let lines = Lines {
            labels: vec![text(); 3],
            across: text(),
            up: text(),
            measure: Measure::Time,
            lines: vec![Line { name: text(), ink: Ink::Plain, values: vec![Some(1.0), None, Some(1e9)] }],
        };
        let points = Points {
            across: text(),
            across_measure: Measure::Count,
            up: text(),
            up_measure: Measure::Count,
            points: vec![Point { x: 1.0, y: 2.0, chosen: Some(text()) }, Point { x: 1e6, y: 0.0, chosen: None }],
            names: [text(), text()],
        };
        let bars = Bars {
            names: vec![text(), "k".repeat(1 << 20), String::new()],
            notes: vec![text(); 3],
            series,
            full: None,
        };
        let plots = [Plot::Columns(columns), Plot::Bars(bars), Plot::Lines(lines), Plot::Points(points)];
        let mut table = Table { heads: vec![text(); 2], rows: vec![vec![text(); 2]; 2 * MOST_ROWS] };
        table.rows[0][0] = "k".repeat(1 << 20);
        let section = |plot| Section { title: text(), says: text(), plot: Some(plot), table: table.clone() };
        Page { title: text(), says: text(), facts: vec![(text(), text())], sections: plots.map(section).into() }
    }

    #[test]
    fn no_text_becomes_a_part_of_the_page() {
        let html = page(&hostile()).unwrap();
        assert!(html.len() < 1_000_000, "{}", html.len());
        assert!(!html.contains("<script") && html.matches("</style>").count() == 1);
        assert!(!html.contains(['\u{202e}', '\0', '\u{1b}', '\u{ffff}']));
        assert!(html.contains("\\u{202e}") && html.contains("&lt;script&gt;"));
        let mut elements = quick_xml::Reader::from_str(&html);
        elements.config_mut().check_end_names = true;
        let (mut depth, mut attributes) = (0_i64, 0);
        loop {
            match elements.read_event().unwrap_or_else(|error| panic!("{error} at {}", elements.error_position())) {
                quick_xml::events::Event::Eof => break,
                quick_xml::events::Event::Start(element) => {
                    depth += 1;
                    attributes +=
                        element.attributes().filter(|attribute| !attribute.as_ref().unwrap().value.is_empty()).count();
                }
                quick_xml::events::Event::End(_) => depth -= 1,
                quick_xml::events::Event::Empty(element) => {
                    let names: Vec<_> = element.attributes().map(|attribute| attribute.unwrap().key).collect();
                    assert!(names.iter().all(|name| !name.as_ref().starts_with(b"on")));
                }
                _ => {}
            }
        }
        assert!(depth == 0 && attributes > 100, "{depth} {attributes}");
    }

    #[test]
    fn a_page_names_each_of_its_parts_and_asks_nobody_for_anything() {
        let html = page(&hostile()).unwrap();
        for part in ["<main>", "<h1>", "lang=\"en\"", "role=\"img\"", "<caption>", "scope=\"row\"", POLICY] {
            assert!(html.contains(part), "{part}");
        }
        for foreign in ["http://", "https://", "src=", "href=", "@import", "url(//", " style="] {
            let found = html.replace("http://www.w3.org/2000/svg", "").contains(foreign);
            assert!(!found, "{foreign}");
        }
        let ids: Vec<_> = html.split(" id=\"").skip(1).map(|rest| rest.split('"').next().unwrap()).collect();
        let mut different = ids.clone();
        different.sort_unstable();
        different.dedup();
        assert_eq!(ids.len(), different.len());
    }
}
