"""Plays a tape in a terminal, and writes what it shows as an asciicast (version 2).

    python3 record.py TAPE FOLDER CAST: runs the commands in FOLDER

What is typed and how long a screen stays is by the numbers below; what a command prints has the times at which it did.
"""

import codecs
import fcntl
import json
import os
import pty
import struct
import sys
import termios
import time

COLUMNS, ROWS = 86, 25
# Characters that appear at once, and seconds between them: fewer frames than one for each.
TYPED, BETWEEN = 5, 0.1
# Seconds to read what a command printed, and a whole screen.
COMMAND, SCREEN = 1.2, 3.2
PROMPT = "\x1b[32m$\x1b[0m "
# A reset clears the screen, and leaves no blanks to be drawn.
HIDE, SHOW, CLEAR = "\x1b[?25l", "\x1b[?25h", "\x1bc"


def screens(tape):
    """The commands of each paragraph."""
    text = "\n".join(line for line in tape.splitlines() if not line.startswith("#"))
    return [paragraph.splitlines() for paragraph in text.strip().split("\n\n")]


def run(command, folder):
    """What it prints on a terminal, each part with the seconds since its start."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(folder)
        os.environ["TERM"] = "xterm-256color"
        for name in ["NO_COLOR", "TOLLGATE_URL"]:
            os.environ.pop(name, None)
        # The terminal has its size before anything asks for it.
        fcntl.ioctl(0, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
        os.execvp("sh", ["sh", "-c", command])
    began, parts = time.monotonic(), []
    decoder = codecs.getincrementaldecoder("utf-8")()
    while True:
        try:
            data = os.read(terminal, 65536)
        except OSError:
            data = b""
        if not data:
            break
        parts.append((time.monotonic() - began, decoder.decode(data)))
    os.close(terminal)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    # A denial is 1.
    if code not in (0, 1):
        sys.exit(f"{command}: ended with {code}: {parts[-1][1] if parts else ''}")
    return parts, time.monotonic() - began


def play(commands, folder):
    """The events of a screen, and how many seconds it lasts."""
    now, events = 0.0, [(0.0, CLEAR)]
    for number, command in enumerate(commands):
        events.append((now, SHOW + PROMPT))
        for start in range(0, len(command), TYPED):
            now += BETWEEN
            events.append((now, command[start : start + TYPED]))
        now += 2 * BETWEEN
        events.append((now, HIDE + "\r\n"))
        parts, seconds = run(command, folder)
        events += [(now + at, text) for at, text in parts]
        now += seconds
        last = number + 1 == len(commands)
        events.append((now, SHOW + PROMPT if last else ""))
        now += SCREEN if last else COMMAND
    return events, now


def main():
    tape, folder, cast = sys.argv[1:]
    with open(tape, encoding="utf-8") as file:
        played = [play(commands, folder) for commands in screens(file.read())]
    # First what comes last, for a moment: whoever shows no animation shows the first frame.
    events = [(0.0, "".join(text for _, text in played[-1][0]))]
    start = BETWEEN
    for screen, seconds in played:
        events += [(start + at, text) for at, text in screen]
        start += seconds
    with open(cast, "w", encoding="utf-8") as file:
        file.write(json.dumps({"version": 2, "width": COLUMNS, "height": ROWS}) + "\n")
        for at, text in events:
            file.write(json.dumps([round(at, 3), "o", text]) + "\n")


main()
