"""How the command line writes numbers, times and names."""


def device_list(devices: tuple[int, ...]) -> str:
    """ "0–3, 6": consecutive numbers as ranges."""
    ranges: list[list[int]] = []
    for device in devices:
        if ranges and device == ranges[-1][1] + 1:
            ranges[-1][1] = device
        else:
            ranges.append([device, device])
    return ", ".join(str(a) if a == b else f"{a}–{b}" for a, b in ranges) or "–"


def clock(seconds: float) -> str:
    """ "0:04:07"."""
    whole = int(seconds)
    return f"{whole // 3600}:{whole // 60 % 60:02d}:{whole % 60:02d}"


def words(name: str) -> str:
    """ "actor training" for "actor_training"."""
    return name.replace("_", " ")


def count(number: int, what: str) -> str:
    """ "no job", "1 job", "2 jobs"."""
    return f"{number or 'no'} {what}{'s' if number > 1 else ''}"
