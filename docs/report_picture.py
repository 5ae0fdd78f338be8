"""Makes docs/report.png: the code of docs/debugging.md, its report, and a headless browser's view.

PYTHONPATH=.:tests python docs/report_picture.py
"""

import base64
import pathlib
import re
import tempfile

from browser import Browser

HERE = pathlib.Path(__file__).parent


def main():
    blocks = re.findall(r"```python\n(.*?)```", (HERE / "debugging.md").read_text(), re.DOTALL)
    code = "\n".join(blocks).replace("tempfile.TemporaryDirectory()", "kept")
    with tempfile.TemporaryDirectory() as folder, Browser() as browser:
        exec(code, {"kept": _Kept(folder)})
        page = pathlib.Path(folder) / "report.html"
        browser.open(page.as_uri(), width=900, height=1250)
        shot = browser.call("Page.captureScreenshot", format="png")["data"]
    (HERE / "report.png").write_bytes(base64.b64decode(shot))


class _Kept:
    """A folder that outlives its `with`."""

    def __init__(self, folder):
        self.folder = folder

    def __enter__(self):
        return self.folder

    def __exit__(self, *_):
        pass


if __name__ == "__main__":
    main()
