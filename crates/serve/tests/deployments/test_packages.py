"""run.sh installs nothing but what packages.txt names, by its SHA-256."""

import os
import pathlib
import re
import subprocess
import tempfile
import unittest

HERE = pathlib.Path(__file__).resolve().parent
TEXT = (HERE / "packages.txt").read_text()
PACKAGES = re.findall(r"^([a-z0-9-]+)==(\S+)((?: \\\n    --hash=sha256:[0-9a-f]{64})+)$", TEXT, re.MULTILINE)


class Packages(unittest.TestCase):
    def test_each_has_its_hashes(self):
        lines = [line for line in TEXT.splitlines() if re.match(r"[^#\s]", line)]
        self.assertEqual(len(PACKAGES), len(lines))

    def test_other_files_of_the_same_names_are_refused(self):
        with tempfile.TemporaryDirectory() as cache:
            others = pathlib.Path(cache, "others")
            others.mkdir()
            for name, version, _ in PACKAGES:
                (others / f"{name.replace('-', '_')}-{version}-py3-none-any.whl").write_text("another's")
            # Nothing is asked of the registry.
            env = {**os.environ, "XDG_CACHE_HOME": cache, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(others)}
            ran = subprocess.run([HERE / "run.sh"], env=env, capture_output=True, text=True, timeout=60, check=False)
            self.assertNotEqual(ran.returncode, 0)
            self.assertIn("DO NOT MATCH THE HASHES", ran.stderr)
            self.assertFalse(pathlib.Path(cache, "tollgate/deployments/made-of").exists())


if __name__ == "__main__":
    unittest.main()
