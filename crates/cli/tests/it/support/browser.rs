//! A headless Chromium, told what to do by the DevTools protocol over a pipe, and axe, which checks accessibility.
//! `tests/browser.sh` installs both.

use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

use serde_json::{Value, json};

/// The names that systems give it.
const NAMES: [&str; 4] = ["chromium-headless-shell", "chromium", "chromium-browser", "google-chrome"];
/// However busy the machine is.
const PATIENCE: Duration = Duration::from_secs(60);

/// A browser with one page, killed on drop.
#[derive(Debug)]
pub(crate) struct Browser {
    process: Child,
    commands: ChildStdin,
    messages: Receiver<Value>,
    session: Option<String>,
    sent: u64,
    axe: String,
    /// What the page has logged and thrown since it was opened.
    complaints: Vec<String>,
    _profile: tempfile::TempDir,
}

/// How a page is looked at.
#[derive(Clone, Copy, Debug)]
pub(crate) struct View {
    pub(crate) width: u32,
    pub(crate) dark: bool,
    pub(crate) printed: bool,
}

impl Browser {
    pub(crate) fn start() -> Self {
        let paths = std::env::var_os("PATH").expect("a PATH");
        let found = NAMES
            .iter()
            .find_map(|name| std::env::split_paths(&paths).map(|path| path.join(name)).find(|path| path.is_file()));
        let program = std::env::var_os("TOLLGATE_TEST_CHROMIUM").map(PathBuf::from).or(found);
        let program = program.expect("Chromium on the PATH, which tests/browser.sh installs");
        let profile = tempfile::tempdir().expect("a folder");
        // The protocol's pipe is descriptors 3 and 4. Without a sandbox, since it may run as root, in a container: it
        // opens nothing but pages of these tests, and no network.
        let mut process = Command::new("sh")
            .args(["-c", "exec \"$0\" \"$@\" 3<&0 4>&1 </dev/null >/dev/null 2>&1"])
            .arg(program)
            .args(["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"])
            .args(["--no-first-run", "--disable-background-networking", "--host-resolver-rules=MAP * ~NOTFOUND"])
            .arg(format!("--user-data-dir={}", profile.path().display()))
            .arg("--remote-debugging-pipe")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("Chromium runs");
        let (commands, answers) = (process.stdin.take().expect("piped"), process.stdout.take().expect("piped"));
        let (sender, messages) = channel();
        std::thread::spawn(move || {
            for message in BufReader::new(answers).split(0) {
                let Ok(message) = message else { return };
                let message = serde_json::from_slice(&message).expect("JSON");
                if sender.send(message).is_err() {
                    return;
                }
            }
        });
        let axe = std::fs::read_to_string(axe()).expect("axe");
        let complaints = Vec::new();
        let mut browser =
            Self { process, commands, messages, session: None, sent: 0, axe, complaints, _profile: profile };
        let page = browser.call("Target.createTarget", &json!({"url": "about:blank"}));
        let attached = browser.call("Target.attachToTarget", &json!({"targetId": page["targetId"], "flatten": true}));
        browser.session = Some(attached["sessionId"].as_str().expect("a session").to_owned());
        for domain in ["Page", "Runtime", "Log"] {
            browser.call(&format!("{domain}.enable"), &json!({}));
        }
        browser
    }

    /// Opens a file.
    pub(crate) fn open(&mut self, file: &Path, view: View) {
        let View { width, dark, printed } = view;
        let metrics = json!({"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600});
        self.call("Emulation.setDeviceMetricsOverride", &metrics);
        let scheme = json!([{"name": "prefers-color-scheme", "value": if dark { "dark" } else { "light" }}]);
        let media = if printed { "print" } else { "screen" };
        self.call("Emulation.setEmulatedMedia", &json!({"media": media, "features": scheme}));
        self.complaints.clear();
        let opened = self.call("Page.navigate", &json!({"url": format!("file://{}", file.display())}));
        assert!(opened["errorText"].is_null(), "{opened}");
        self.until("Page.loadEventFired");
    }

    /// What the page has complained of: errors, warnings, exceptions, requests that its policy refused.
    pub(crate) fn complaints(&self) -> &[String] {
        &self.complaints
    }

    /// The value of an expression in the page, awaited.
    pub(crate) fn value(&mut self, expression: &str) -> Value {
        let asked = json!({"expression": expression, "awaitPromise": true, "returnByValue": true});
        let answer = self.call("Runtime.evaluate", &asked);
        assert!(answer["exceptionDetails"].is_null(), "{expression}: {answer}");
        answer["result"]["value"].clone()
    }

    /// What axe finds: each rule that is broken, and where; and how many rules it found kept.
    pub(crate) fn axe(&mut self) -> (Vec<String>, u64) {
        let axe = self.axe.clone();
        self.value(&format!("{axe}; 0"));
        let found = self.value(
            "axe.run().then(found => ({ kept: found.passes.length, broken: found.violations.map(broken => \
             `${broken.id}: ${broken.nodes.map(node => node.html + ' ' + node.failureSummary).join('; ')}`) }))",
        );
        let broken = found["broken"].as_array().expect("a list").iter();
        (broken.map(|text| text.as_str().unwrap_or_default().to_owned()).collect(), found["kept"].as_u64().unwrap_or(0))
    }

    /// The page as a PDF, in base 64.
    pub(crate) fn pdf(&mut self) -> String {
        self.call("Page.printToPDF", &json!({"printBackground": false}))["data"].as_str().expect("a PDF").to_owned()
    }

    /// The whole page as a picture, in base 64.
    pub(crate) fn picture(&mut self) -> String {
        let whole = json!({"format": "png", "captureBeyondViewport": true});
        self.call("Page.captureScreenshot", &whole)["data"].as_str().expect("a picture").to_owned()
    }

    fn call(&mut self, method: &str, parameters: &Value) -> Value {
        self.sent += 1;
        let mut command = json!({"id": self.sent, "method": method, "params": parameters});
        if let Some(session) = &self.session {
            command["sessionId"] = json!(session);
        }
        let mut text = command.to_string().into_bytes();
        text.push(0);
        self.commands.write_all(&text).and_then(|()| self.commands.flush()).expect("Chromium listens");
        let sent = self.sent;
        let answer = self.next(|message| message["id"] == json!(sent));
        assert!(answer["error"].is_null(), "{method}: {}", answer["error"]);
        answer["result"].clone()
    }

    fn until(&mut self, event: &str) {
        self.next(|message| message["method"] == json!(event));
    }

    fn next(&mut self, wanted: impl Fn(&Value) -> bool) -> Value {
        loop {
            let message = self.messages.recv_timeout(PATIENCE).expect("an answer of Chromium");
            if let Some("Runtime.exceptionThrown" | "Runtime.consoleAPICalled" | "Log.entryAdded") =
                message["method"].as_str()
            {
                self.complaints.push(message["params"].to_string());
            }
            if wanted(&message) {
                return message;
            }
        }
    }
}

impl Drop for Browser {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// Where axe is.
fn axe() -> PathBuf {
    if let Some(axe) = std::env::var_os("TOLLGATE_TEST_AXE") {
        return axe.into();
    }
    let cache = std::env::var_os("XDG_CACHE_HOME").map(PathBuf::from);
    let home = || PathBuf::from(std::env::var_os("HOME").expect("HOME")).join(".cache");
    let axe = cache.unwrap_or_else(home).join("tollgate/browser/node_modules/axe-core/axe.min.js");
    assert!(axe.exists(), "{}: expected axe, which tests/browser.sh installs", axe.display());
    axe
}
