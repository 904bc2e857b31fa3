//! What every report has to be in a browser, whatever it says.

use std::path::Path;

use serde_json::json;

use super::browser::{Browser, View};

/// A phone and a large screen, each light and dark, and paper.
const VIEWS: [View; 5] = [
    View { width: 360, dark: false, printed: false },
    View { width: 360, dark: true, printed: false },
    View { width: 1600, dark: false, printed: false },
    View { width: 1600, dark: true, printed: false },
    View { width: 794, dark: true, printed: true },
];

/// Texts of plots that overlap, or are cut off by the edge of their plot.
const ILLEGIBLE: &str = "(() => {
    const found = [];
    for (const plot of document.querySelectorAll('figure > svg')) {
        const edge = plot.getBoundingClientRect();
        if (edge.width === 0) continue;
        const texts = [...plot.querySelectorAll('text')].map(text => [text.textContent.trim(), text.getBoundingClientRect()]);
        texts.forEach(([text, box], at) => {
            if (box.left < edge.left - 1 || box.right > edge.right + 1 || box.top < edge.top - 1 || box.bottom > edge.bottom + 1)
                found.push(`cut off: ${text}`);
            if (box.height < 9) found.push(`too small: ${text}`);
            for (const [other, its] of texts.slice(at + 1))
                if (Math.min(box.right, its.right) - Math.max(box.left, its.left) > 1 &&
                    Math.min(box.bottom, its.bottom) - Math.max(box.top, its.top) > 4)
                    found.push(`overlap: ${text} | ${other}`);
        });
    }
    return found;
})()";

/// Opens it in each view, and holds it to what all pages have to be. Pictures are left in the
/// folder TOLLGATE_TEST_PICTURES, if that is set, as base 64.
pub(crate) fn is_sound(browser: &mut Browser, file: &Path) {
    let pictures = std::env::var_os("TOLLGATE_TEST_PICTURES");
    let name = file.file_stem().expect("a name").to_string_lossy().into_owned();
    for view in VIEWS {
        browser.open(file, view);
        let shown = format!("{name}, {view:?}");
        assert_eq!(browser.value("document.querySelectorAll('h1').length"), json!(1), "{shown}");
        // It fits into the width, and each plot is seen once.
        let too_wide = "document.documentElement.scrollWidth - window.innerWidth";
        assert!(browser.value(too_wide).as_i64().is_some_and(|more| more <= 0), "{shown}: {}", browser.value(too_wide));
        let seen = "[...document.querySelectorAll('figure')].map(figure => \
            [...figure.querySelectorAll(':scope > svg')].filter(svg => svg.getBoundingClientRect().height > 30).length)";
        let seen = browser.value(seen);
        assert!(seen.as_array().is_some_and(|seen| seen.iter().all(|seen| *seen == json!(1))), "{shown}: {seen}");
        assert_eq!(browser.value(ILLEGIBLE), json!([]), "{shown}");
        let colour = browser.value("getComputedStyle(document.body).backgroundColor");
        let paper = if view.dark && !view.printed { "rgb(20, 23, 26)" } else { "rgb(255, 255, 255)" };
        assert_eq!(colour, json!(paper), "{shown}");
        // On paper, all numbers are there; on a screen, those beside a plot once they are asked for.
        let hidden = browser.value("[...document.querySelectorAll('table')].filter(table => !table.checkVisibility({ contentVisibilityAuto: true })).length");
        let plots = browser.value("document.querySelectorAll('figure').length");
        assert_eq!(hidden, if view.printed { json!(0) } else { plots }, "{shown}");
        browser.value("document.querySelectorAll('details').forEach(details => { details.open = true; })");
        assert!(browser.value(too_wide).as_i64().is_some_and(|more| more <= 0), "{shown}, with tables");
        // It takes most of the time, and asks about structure, which is the same in all views, and colours.
        if view.width == 1600 || (view.width == 360 && !view.dark) {
            let (broken, kept) = browser.axe();
            assert!(broken.is_empty() && kept > 15, "{shown}: {kept} kept, {broken:#?}");
        }
        assert!(browser.complaints().is_empty(), "{shown}: {:?}", browser.complaints());
        if let Some(folder) = &pictures {
            let name = format!("{name}-{}{}", view.width, if view.dark { "-dark" } else { "" });
            std::fs::write(Path::new(folder).join(name + ".png.base64"), browser.picture()).expect("written");
        }
        if view.printed {
            let pdf = browser.pdf();
            // %PDF in base 64, and more than an empty page.
            assert!(pdf.starts_with("JVBERi") && pdf.len() > 20_000, "{shown}: {}", pdf.len());
            if let Some(folder) = &pictures {
                std::fs::write(Path::new(folder).join(name.clone() + ".pdf.base64"), pdf).expect("written");
            }
        }
    }
}
