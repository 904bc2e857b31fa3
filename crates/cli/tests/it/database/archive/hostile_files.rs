//! Files, manifests and folders that aren't what tollgate made: no row of them is shown, and none takes much memory.

use std::path::Path;
use std::process::Command;
use std::sync::Arc;

use parquet::basic::{Compression, Encoding, ZstdLevel};
use parquet::data_type::{ByteArray, ByteArrayType, Int32Type, Int64Type};
use parquet::file::properties::{WriterProperties, WriterPropertiesBuilder};
use parquet::file::reader::{FileReader, SerializedFileReader};
use parquet::file::writer::SerializedFileWriter;
use parquet::schema::types::ColumnPath;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use tollgate_record::archive::{ArchivedRow, Month};
use tollgate_testing::effort::cases;
use tollgate_testing::python::python;

use super::{Place, all_of, fill, is_gone, march, moved, moved_again, only, prepared, small_files};
use crate::support::tool::{code, lines, stderr, stdout, tollgate};

/// A manifest as it is stored.
#[derive(Deserialize, Serialize)]
pub(super) struct Manifest {
    format: u32,
    table: String,
    month: String,
    rows: u64,
    bytes: u64,
    checksum: String,
    first_at: Option<String>,
    last_at: Option<String>,
    made_at: String,
    made_by: String,
    pub(super) parts: Vec<Part>,
    sha256: String,
}

#[derive(Deserialize, Serialize)]
pub(super) struct Part {
    name: String,
    rows: u64,
    bytes: u64,
    pub(super) checksum: String,
    pieces: Vec<Piece>,
}

#[derive(Deserialize, Serialize)]
struct Piece {
    bytes: u64,
    sha256: String,
}

impl Manifest {
    pub(super) fn read(file: &Path) -> Self {
        serde_json::from_slice(&std::fs::read(file).expect("a file")).expect("a manifest")
    }

    /// With the hash that it should have.
    pub(super) fn write(&mut self, file: &Path) {
        self.sha256 = String::new();
        self.sha256 = sha256(self.text().as_bytes());
        std::fs::write(file, self.text()).expect("written");
    }

    fn text(&self) -> String {
        serde_json::to_string_pretty(self).expect("JSON") + "\n"
    }
}

fn sha256(bytes: &[u8]) -> String {
    Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect()
}

/// What is shown of one user, and what is said.
async fn shown(place: &Place, user: &str) -> (Vec<ArchivedRow>, Vec<String>) {
    let (mut rows, mut found, mut errors) = (place.archive.query(user, None, None), Vec::new(), Vec::new());
    loop {
        match rows.next().await {
            Ok(Some(more)) => found.extend(more),
            Ok(None) => return (found, errors),
            Err(error) => errors.push(error.to_string()),
        }
    }
}

#[tokio::test]
async fn no_bit_of_a_file_or_a_manifest_changes_what_is_shown_without_an_error_that_names_it() {
    let each = cases(25);
    // Some of them in each file.
    let users = ["Bob", "alice", "zoë", "李"];
    let (server, database) = prepared().await;
    let place = Place::new();
    fill(&server, march(), 300).await;
    only(&database, &place, &small_files()).await.expect("moved");
    let mut rows = Vec::new();
    for user in users {
        let (found, none) = shown(&place, user).await;
        assert!(found.len() > 30 && none.is_empty(), "{user}");
        rows.push(found);
    }
    let mut random = 7_u64;
    for file in place.files(march()) {
        let name = file.file_name().and_then(|name| name.to_str()).expect("a name").to_owned();
        let named = name.replace("manifest.json", "2020-03: manifest: ");
        let whole = std::fs::read(&file).expect("a file");
        for _ in 0..each {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            let (at, bit) = ((random >> 33) as usize % whole.len(), (random >> 20) % 8);
            let what = format!("{name}, byte {at}, bit {bit}");
            let mut bytes = whole.clone();
            bytes[at] ^= 1 << bit;
            std::fs::write(&file, &bytes).expect("written");
            let mut errors = Vec::new();
            for (user, rows) in users.iter().zip(&rows) {
                let (found, said) = shown(&place, user).await;
                assert!(found.iter().all(|row| rows.contains(row)), "{what}");
                assert!(found == *rows || !said.is_empty(), "{what}: rows of {user} are missing");
                errors.extend(said);
            }
            assert!(!errors.is_empty() && errors.iter().all(|error| error.contains(&named)), "{what}: {errors:?}");
            assert_eq!(place.archive.describe(march()).await.is_err(), name == "manifest.json", "{what}");
        }
        std::fs::write(&file, &whole).expect("written");
    }
}

/// Replaces the only file of a month by one of so many rows, whose users and endpoints are this text, and the manifest
/// by one that is true of it.
fn replace(place: &Place, rows: usize, text: &[u8], with: impl Fn(WriterPropertiesBuilder) -> WriterPropertiesBuilder) {
    let path = place.file(march(), "part-0");
    let original = SerializedFileReader::new(std::fs::File::open(&path).expect("a file")).expect("Parquet");
    let schema = original.metadata().file_metadata().schema_descr().root_schema_ptr();
    let properties = WriterProperties::builder()
        .set_compression(Compression::ZSTD(ZstdLevel::default()))
        .set_statistics_enabled(parquet::file::properties::EnabledStatistics::None);
    let mut writer =
        SerializedFileWriter::new(Vec::new(), schema, Arc::new(with(properties).build())).expect("a writer");
    let mut group = writer.next_row_group().expect("a group");
    let text = ByteArray::from(text.to_vec());
    let levels = vec![1; rows];
    for at in 0..18 {
        let mut column = group.next_column().expect("a column").expect("18 columns");
        match at {
            0 | 10 | 11 | 13 | 16 => drop(column.typed::<Int64Type>().write_batch(&vec![1; rows], Some(&levels), None)),
            12 => drop(column.typed::<Int32Type>().write_batch(&vec![1; rows], Some(&levels), None)),
            4 => drop(column.typed::<ByteArrayType>().write_batch(&vec![text.clone(); rows], Some(&levels), None)),
            _ => drop(column.typed::<ByteArrayType>().write_batch(
                &vec![ByteArray::from("x"); rows],
                Some(&levels),
                None,
            )),
        }
        column.close().expect("closed");
    }
    group.close().expect("closed");
    let end = writer.bytes_written();
    let bytes = writer.into_inner().expect("a file");
    let manifest = place.folder(march()).join("manifest.json");
    let mut edited = Manifest::read(&manifest);
    let part = &mut edited.parts[0];
    let piece = |bytes: &[u8]| Piece { bytes: bytes.len() as u64, sha256: sha256(bytes) };
    (part.rows, part.bytes, part.pieces) =
        (rows as u64, bytes.len() as u64, vec![piece(&bytes[..end]), piece(&bytes[end..])]);
    (edited.rows, edited.bytes) = (part.rows, part.bytes);
    edited.write(&manifest);
    std::fs::write(path, bytes).expect("written");
}

/// Runs the tool; returns its output, and the most memory it had in use, in kilobytes.
fn measured(arguments: &[&str]) -> (String, u64) {
    let script = "
import resource, subprocess, sys
output = subprocess.run(sys.argv[1:], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE).stderr
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
print(output.decode())
";
    let mut command = Command::new(python());
    command.args(["-c", script, env!("CARGO_BIN_EXE_tollgate")]).args(arguments);
    let output = command.output().expect("Python");
    let said = stdout(&output);
    let (memory, said) = said.split_once('\n').unwrap_or_else(|| panic!("{output:?}"));
    (said.trim_end().to_owned(), memory.parse().expect("kilobytes"))
}

#[tokio::test]
async fn a_file_that_takes_much_more_memory_than_disk_is_refused_before_it_does() {
    let (server, database) = prepared().await;
    let place = Place::new();
    fill(&server, march(), 50).await;
    only(&database, &place, &small_files()).await.expect("moved");
    let arguments = ["archive", "query", "--user", "x", "--store", place.url()];
    let (_, usual) = measured(&arguments);
    let endpoint = ColumnPath::from("endpoint");
    let dictionary = |properties: WriterPropertiesBuilder| {
        properties.set_dictionary_enabled(true).set_dictionary_page_size_limit(1 << 30)
    };
    let decompressed = "a group that decompresses to more than 67108864 bytes";
    for (rows, length, is_dictionary, expected) in [
        // A page of 200 MB; a dictionary's value that is repeated; values that share what they begin with.
        (1, 200 << 20, false, decompressed),
        (2000, 100 << 10, true, decompressed),
        (150, 1 << 20, false, " in DELTA_BYTE_ARRAY"),
    ] {
        replace(&place, rows, &vec![b'a'; length], |properties| match (is_dictionary, rows) {
            (true, _) => dictionary(properties),
            (false, 1) => properties.set_dictionary_enabled(false),
            (false, _) => properties
                .set_dictionary_enabled(false)
                .set_column_encoding(endpoint.clone(), Encoding::DELTA_BYTE_ARRAY),
        });
        let stored = std::fs::metadata(place.file(march(), "part-0")).expect("a file").len();
        assert!(stored < 1 << 20, "{stored}");
        let (said, memory) = measured(&arguments);
        assert!(said.starts_with("error: archive of 2020-03: part-0-") && said.ends_with(expected), "{said}");
        assert!(said.lines().count() == 1 && memory < usual + (80 << 10), "{memory} kB, usually {usual}: {said}");
        let error = place.archive.verify(march()).await.expect_err("too large");
        assert!(error.is_damaged(), "{error}");
    }
}

#[tokio::test]
async fn a_manifest_of_other_files_or_of_another_month_is_refused() {
    let (server, database) = prepared().await;
    let place = Place::new();
    fill(&server, march(), 50).await;
    only(&database, &place, &small_files()).await.expect("moved");
    let path = place.folder(march()).join("manifest.json");
    let whole = std::fs::read(&path).expect("a file");
    let refused = async |edit: &dyn Fn(&mut Manifest), expected: &str| {
        let mut manifest: Manifest = serde_json::from_slice(&whole).expect("a manifest");
        edit(&mut manifest);
        manifest.write(&path);
        let error = place.archive.verify(march()).await.expect_err(expected).to_string();
        assert!(error.starts_with("archive of 2020-03: ") && error.contains(expected), "{expected}: {error}");
        assert!(error.lines().count() == 1 && error.len() < 400, "{error}");
        let (rows, errors) = shown(&place, "zoë").await;
        assert!(rows.is_empty() && errors.len() == 1 && errors[0].contains(expected), "{rows:?} {errors:?}");
    };
    let secret = place.directory.path().join("secret");
    std::fs::write(&secret, "sesame").expect("written");
    for name in ["../../../secret", &secret.display().to_string(), "part-0-0123456789abcdef.parquet/../x", ""] {
        refused(&|it| it.parts[0].name = name.to_owned(), "manifest: its totals or file names are inconsistent").await;
    }
    refused(&|it| it.parts[0].name = "part-0-0123456789abcdef.parquet".to_owned(), "file not found").await;
    refused(&|it| it.month = "2020-04".to_owned(), "manifest: made for another month").await;
    refused(&|it| it.rows += 1, "manifest: its totals or file names are inconsistent").await;
    refused(&|it| it.format = 2, "manifest: expected format 1, got 2").await;
    let pieces = "the sizes of its pieces don't add up to that of the file";
    refused(&|it| it.parts[0].pieces.clear(), pieces).await;
    refused(&|it| it.parts[0].pieces[0].bytes = u64::MAX, pieces).await;
    let many = |it: &mut Manifest| {
        (it.bytes, it.parts[0].bytes, it.parts[0].pieces[0].bytes) = (1 << 40, 1 << 40, 1 << 39);
        it.parts[0].pieces[1].bytes = 1 << 39;
    };
    refused(&many, "expected pieces of at most 4194304 bytes, got 549755813888").await;
    let one = |it: &mut Manifest| {
        let bytes = it.parts[0].bytes;
        it.parts[0].pieces = vec![Piece { bytes, sha256: String::new() }];
    };
    refused(&one, ".parquet: expected the SHA-256 ").await;
    std::fs::write(&path, whole).expect("written");
    std::fs::File::options().write(true).open(&path).and_then(|file| file.set_len(1 << 40)).expect("longer");
    let error = place.archive.describe(march()).await.expect_err("too long").to_string();
    assert_eq!(error, "archive of 2020-03: manifest: expected at most 16777216 bytes, got 1099511627776");
}

#[cfg(unix)]
#[tokio::test]
async fn links_and_special_files_are_refused_and_nothing_behind_them_is_deleted() {
    let (server, database) = prepared().await;
    let place = Place::new();
    let [april, may]: [Month; 2] = ["2020-04", "2020-05"].map(|month| month.parse().expect("a month"));
    fill(&server, march(), 50).await;
    fill(&server, may, 50).await;
    moved(&database, &place, &small_files()).await;
    // April is March; the manifest of May is a pipe, which nobody writes to; and a folder contains itself.
    std::os::unix::fs::symlink(place.folder(march()), place.folder(april)).expect("a link");
    std::os::unix::fs::symlink(place.directory.path(), place.directory.path().join("audit/loop")).expect("a link");
    let pipe = place.folder(may).join("manifest.json");
    std::fs::remove_file(&pipe).expect("removed");
    assert!(Command::new("mkfifo").arg(&pipe).status().expect("mkfifo").success());
    let before = place.files(march());
    let run = |arguments: &[&str]| tollgate(&[&["archive"], arguments, &["--store", place.url()]].concat());
    let linked = "is a symbolic link, which an archive can't contain";
    for command in [&["list"][..], &["verify"], &["query", "--user", "zoë"]] {
        let output = run(command);
        let said = stderr(&output);
        assert!(code(&output) == 1 && stdout(&output).contains("2020-03"), "{command:?}: {output:?}");
        assert!(said.contains("error: archive of 2020-04: ") && said.contains(linked), "{said}");
        assert!(said.contains("error: archive of 2020-05: ") && said.contains("not a regular file"), "{said}");
        assert_eq!(said.lines().count(), 2, "{said}");
    }
    let deleted = run(&["delete", "2020-04", "--yes"]);
    assert!(code(&deleted) == 1 && stderr(&deleted).contains(linked), "{deleted:?}");
    // A table of April isn't archived over March either.
    fill(&server, april, 50).await;
    let mut options = small_files();
    options.replace.insert(april);
    for options in [small_files(), options] {
        let error = only(&database, &place, &options).await.expect_err("a link");
        assert!(error.starts_with("archive of 2020-04: ") && error.contains(linked), "{error}");
    }
    assert_eq!(place.files(march()), before);
    std::fs::remove_file(place.folder(april)).expect("removed");
    only(&database, &place, &small_files()).await.expect("moved");
    assert!(moved_again(&database, &place).await);
    assert_eq!(lines(&run(&["list"])).len(), 2);
}

/// As a table whose bounds somebody has dropped may have it.
#[tokio::test]
async fn a_row_of_200_mb_is_cut_off_and_named_and_keeps_no_month_from_being_moved() {
    let (server, _) = prepared().await;
    let place = Place::new();
    fill(&server, march(), 300).await;
    server
        .run(
            "ALTER TABLE tollgate.rate_limit_audit_logs DROP CONSTRAINT texts_are_bounded;
            INSERT INTO tollgate.rate_limit_audit_logs (at, user_id, endpoint, decision, reason, latency_us) VALUES
                ('2020-03-09 12:00:00+00', 'large', repeat('é', 100000000), 'allowed', 'allowed', 1),
                ('2020-03-09 13:00:00+00', 'large', repeat('x', 65536), 'allowed', 'allowed', 2)",
        )
        .await;
    let output = tollgate(&["archive", "--database", &server.url(), "--store", place.url()]);
    let expected =
        "tollgate: 2020-03: texts above 64 KiB are cut in the row of user \"large\" at 2020-03-09T12:00:00Z\n";
    assert_eq!((code(&output), stderr(&output).as_str()), (0, expected));
    assert!(stdout(&output).starts_with("2020-03: 302 rows archived in 1 file of "), "{output:?}");
    assert!(is_gone(&server, march()).await);
    assert_eq!(place.archive.verify(march()).await.expect("whole").rows, 302);
    let rows = all_of(&place, "large", None, None).await;
    let endpoints: Vec<_> = rows.iter().map(|row| row.endpoint.clone().unwrap_or_default()).collect();
    assert_eq!(endpoints[0], "é".repeat(8192) + "... (cut off, of 200000000 bytes)");
    assert_eq!(endpoints[1], "x".repeat(65_536), "whole");
}
