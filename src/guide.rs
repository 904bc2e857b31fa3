// The guide. Each page is read in two places: as a file on a code host, where its links lead to the files that it names
// at its end; and here, where rustdoc_links.md comes first and gives the same names to modules: of several definitions
// the first counts. The programs on a page are doctests, if the features that they need are enabled.
#![doc = include_str!("guide/rustdoc_links.md")]
#![cfg_attr(feature = "http", doc = "[answers]: crate::middleware\n")]
#![cfg_attr(feature = "rules", doc = "[format]: crate::rules\n[by-response]: crate::rules#counting-by-the-response\n")]
#![cfg_attr(feature = "rules", doc = "[together]: crate::rules#several-rules-at-once\n")]
#![cfg_attr(any(not(doctest), feature = "embedded"), doc = include_str!("guide.md"))]

pub mod trace {
    #![doc = include_str!("guide/rustdoc_links.md")]
    #![doc = include_str!("guide/trace.md")]
    // Rustdoc publishes no files beside its pages. So the pictures are put into the page, in place of the images.
    #![doc = "\n<style>.docblock img[src^='trace-'] { display: none; }</style>\n"]
    #![doc = "\n<div>"]
    #![doc = include_str!("guide/trace-token-bucket.svg")]
    #![doc = include_str!("guide/trace-fixed-window.svg")]
    #![doc = include_str!("guide/trace-calendar-window.svg")]
    #![doc = include_str!("guide/trace-sliding-window.svg")]
    #![doc = include_str!("guide/trace-sliding-log.svg")]
    #![doc = include_str!("guide/trace-concurrency.svg")]
    #![doc = "</div>"]
}

pub mod algorithms {
    #![doc = include_str!("guide/rustdoc_links.md")]
    #![doc = include_str!("guide/algorithms.md")]
}

pub mod numbers {
    #![doc = include_str!("guide/rustdoc_links.md")]
    #![doc = include_str!("guide/numbers.md")]
}

pub mod blocks {
    #![doc = include_str!("guide/rustdoc_links.md")]
    #![doc = include_str!("guide/blocks.md")]
}

pub mod unreachable {
    #![doc = include_str!("guide/rustdoc_links.md")]
    #![cfg_attr(feature = "rules", doc = "[together]: crate::rules#several-rules-at-once\n")]
    #![cfg_attr(any(not(doctest), feature = "embedded"), doc = include_str!("guide/unreachable.md"))]
}

pub mod changes {
    #![doc = include_str!("guide/rustdoc_links.md")]
    #![cfg_attr(any(not(doctest), feature = "embedded"), doc = include_str!("guide/changes.md"))]
}

pub mod load {
    #![doc = include_str!("guide/rustdoc_links.md")]
    #![cfg_attr(any(not(doctest), feature = "embedded"), doc = include_str!("guide/load.md"))]
}

pub mod faq {
    #![doc = include_str!("guide/rustdoc_links.md")]
    #![cfg_attr(feature = "rules", doc = "[format]: crate::rules\n")]
    #![cfg_attr(any(not(doctest), all(feature = "embedded", feature = "axum")), doc = include_str!("guide/faq.md"))]
}
