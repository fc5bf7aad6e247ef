"""Lines that name a fault and report none: counts of zero, settings, hints, printed code, chatter.

A log holds more than events. `reports` says whether a line tells that something happened; `GOES_ON` finds the words
with which a program gets over it.
"""

import re

ERROR = re.compile(r"Error\b|Exception\b|\bassert|\braise\b|Assertion|what\(\)|FATAL|\bERROR\b")
EXCEPTION = re.compile(r"[\w.]*(Error|Exception)\b")  # begins with an exception's name
CODE = re.compile(r"\s*([#+]|-\s{3}|(raise|except|if|elif|assert|print|trap|echo|export|kill|pkill)\b)")
GOES_ON = re.compile(  # a logger's warning, or words
    r"""\[?W(\d{4}\s|\d*\s([\d:.]+\s)?\S+\.cpp) | (?<!NCCL\s)\bWARN(ING)?\b | Warning: | \b(re)?trying\b
      | \bskip(ping|ped)\b | \bfall(ing|s)?\ back\b | \bignor(ed|ing)\b | \bcontinuing\b | \breducing\ batch
      | \brestart(ing)?\b""",
    re.VERBOSE | re.IGNORECASE,
)
CHATTER = re.compile(r'File "|.*NCCL INFO (?!Call to|socketPollConnect)')  # a frame of a traceback, NCCL's steps
INFO = re.compile(r".*(^|[\s\[|(])(?<!NCCL )(INFO|DEBUG)\b(?!.*OVERFLOW)|\[?[IV]\d{4} ")
SETTING = re.compile(  # a key and a plain value; but not exitcode: -9, KeyError: 'a'
    r"""\W*(?!\S*(?-i:Error|Exception)\b|(error|exit|\S*code|reason|message|signal|what)\b)
        [\w.-]+["']?\s*(:|=|\.{3,})\s*
        ((?-i:[a-z_]+)|true|false|none|null|-?[\d.]+|"[^"]*"|'[^']*'|\[.*\]|\{.*\}),?$""",
    re.VERBOSE | re.IGNORECASE,
)
HINT = re.compile(r"\W*(tip|hint|if you)\b|#SBATCH", re.IGNORECASE)
PASSED = re.compile(r".*\b(PASSED|XFAIL|SKIPPED)\b")
NO = re.compile(r"(^0|\b(no|zero|never|without)) (\w+ ){0,2}$", re.IGNORECASE)  # in front of the words of a fault
ZERO = re.compile(  # behind them
    r"(?<!rank)\w*( (?!rank|local|gpu)\w+){0,2}(\s*=\s*|\s*:\s+)(0+(\.0+)?|no|none|false|\[\])\s*([,;|)]|$)",
    re.IGNORECASE,
)
OTHERS = ("waiting", "ended", "secondary")  # levels of lines that launchers print as information


def reports(text: str, found: re.Match[str], level: str, in_traceback: bool) -> bool:
    """True if the line tells that it happened; found: the words of a fault in it."""
    if level in ("verdict", "trace", "benign"):
        return True
    if CODE.match(text) and not in_traceback:
        return False
    if NO.search(text[: found.start()]) or ZERO.match(text, found.end()):
        return False
    kinds = (CHATTER, SETTING, HINT, PASSED) if level in OTHERS else (CHATTER, SETTING, HINT, PASSED, INFO)
    return not any(kind.match(text) for kind in kinds)
