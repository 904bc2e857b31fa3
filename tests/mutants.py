#!/usr/bin/env python3
"""Changes the scripts one place at a time, as tests/mutants.json lists them, and runs the tests that decide with them
until one fails: first the one that the list names for it, if any. Ends with the mutants that no test has noticed.
  python3 tests/mutants.py [--write] [FILE.lua | NAME]...
  --write  writes into the list by which test each was noticed
Builds the tests once, in a copy of the files whose library reads the changed script when it runs, and tries two mutants
at a time; most take some seconds, one that survives some minutes. Exits with 1 if one survived, with 2 on misuse."""
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor

ROOT = pathlib.Path(__file__).resolve().parent.parent
# What finds most in the least time comes first. The last are left out: they hold the texts themselves to the files.
STAGES = [
    ["vectors", "expiry", "packed"],
    ["laws", "law_", "operations", "request_ids", "corrupted_state"],
    ["random", "together", "turns", "two_versions", "late_refunds", "across"],
    ["on_servers"],
]
LEFT_OUT = ["script_files", "layouts"]


LIST = ROOT / "tests/mutants.json"


def chosen(mutants, words):
    unknown = [word for word in words if not any(word in (m["file"], m["name"]) for m in mutants)]
    if unknown:
        print(f"tests/mutants.py: expected a file or a name in tests/mutants.json, got {unknown[0]}", file=sys.stderr)
        sys.exit(2)
    for m in mutants:
        count = (ROOT / "lua" / m["file"]).read_text().count(m["old"])
        if count != 1:
            print(f"tests/mutants.py: {m['name']}: expected its text once in {m['file']}, got {count}", file=sys.stderr)
            sys.exit(2)
    return [m for m in mutants if not words or m["file"] in words or m["name"] in words]


# What the copy's library does with a script's text.
MADE = "[&[before, ARGUMENTS][..], &self.files, &[KEYS, DECIDE]].concat().concat()"
CHANGED = """
fn changed(text: String) -> String {
    let [whole, mutant] = ["WHOLE", "MUTANT"].map(|name| std::fs::read_to_string(std::env::var(name).unwrap()).unwrap());
    text.replace(&whole, &mutant)
}
"""


def copied(folder):
    """A copy of the files under version control, whose library changes the scripts."""
    files = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout
    for name in filter(None, files.split("\0")):
        to = folder / name
        to.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, to)
    script = folder / "src/script.rs"
    text = script.read_text()
    if text.count(MADE) != 1:
        sys.exit(f"tests/mutants.py: expected once in src/script.rs: {MADE}")
    script.write_text(text.replace(MADE, f"changed({MADE})") + CHANGED)


def built(folder):
    """The test program."""
    environment = {**os.environ, "CARGO_INCREMENTAL": "0", "CARGO_TARGET_DIR": str(ROOT / "target/mutants")}
    command = ["cargo", "test", "--quiet", "-p", "tollgate", "--all-features", "--test", "it", "--no-run",
               "--message-format=json"]
    output = subprocess.run(command, cwd=folder, env=environment, check=True, stdout=subprocess.PIPE, text=True).stdout
    programs = [json.loads(line).get("executable") for line in output.splitlines() if line.startswith("{")]
    return [program for program in programs if program][-1]


def killed_by(mutant, program, folder):
    """The first test that failed; none if all passed."""
    whole = folder / "lua" / mutant["file"]
    changed = folder / f"{mutant['name']}.lua"
    changed.write_text(whole.read_text().replace(mutant["old"], mutant["new"]))
    environment = {**os.environ, "RUST_BACKTRACE": "0", "WHOLE": str(whole), "MUTANT": str(changed)}
    named = [["--exact", mutant["killed_by"]]] if "killed_by" in mutant else []
    for words in [*named, *STAGES]:
        command = [program, *words, *(word for name in LEFT_OUT for word in ("--skip", name))]
        # With the servers that it starts, in a group of their own, which ends with the first test that fails.
        run = subprocess.Popen(command, cwd=folder, env=environment, start_new_session=True, text=True,
                               stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        late = threading.Timer(900, end, [run])
        late.start()
        failed = next((line for line in run.stdout if re.fullmatch(r"test .* \.\.\. FAILED\n", line)), None)
        was_late = late.finished.is_set()
        late.cancel()
        if failed:
            end(run)
            return failed.split()[1]
        if run.wait() != 0:
            return f"{words[0]} and others, " + ("by their time" if was_late else f"which ended with {run.returncode}")
    return None


def end(run):
    try:
        os.killpg(run.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    run.wait()


def main():
    words = sys.argv[1:]
    if any(word in ("-h", "--help") for word in words):
        print(__doc__)
        return
    every = json.loads(LIST.read_text())
    mutants = chosen(every, [word for word in words if word != "--write"])
    survived = []
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(2) as workers:
        folder = pathlib.Path(folder)
        copied(folder)
        program = built(folder)

        def tried(m):
            test = killed_by(m, program, folder)
            print(f"{m['file']} {m['name']}: {f'killed by {test}' if test else 'SURVIVED'}", flush=True)
            if "--write" in words and test and " " not in test:
                m["killed_by"] = test
            return test

        for m, test in zip(mutants, workers.map(tried, mutants)):
            if not test:
                survived.append(m)
            if "--write" in words:
                lines = ",\n".join(json.dumps(one, ensure_ascii=False) for one in every)
                LIST.write_text(f"[\n{lines}\n]\n")
    print(f"{len(mutants) - len(survived)} of {len(mutants)} mutants killed")
    for m in survived:
        print(f"survived: {m['file']} {m['name']}: {m['shows']}")
    sys.exit(1 if survived else 0)


if __name__ == "__main__":
    main()
