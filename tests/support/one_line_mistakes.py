"""A file of text with one mistake in one of its lines, as a tired editor makes them."""


def mistaken(text, pick):
    """The text with one line changed; `pick` is a `random.Random`."""
    lines = text.splitlines()
    places = [n for n, line in enumerate(lines) if line.strip() and line.strip()[0] != "#"]
    place = pick.choice(places)
    line = lines[place]
    at = pick.randrange(len(line) + 1)
    key, colon, value = line.partition(":")
    changes = [
        "",  # the line is lost
        f"  {line}",
        line[1:],
        f"\t{line}",
        line[:at],
        f"{line[:at]}{pick.choice(':[]{}&*!|>%@`-#')}{line[at:]}",
        line.replace(":", "", 1),
        f"{key}: 7",
        f"{key}:",
        f"{key}: []",
        f"{key}: {{}}",
        f"{key}: {{a: 1}}",
        f"{key}: [[1], {{2: 3}}]",
        f"{key[:-1]}{colon}{value}",
        line.replace("'", "").replace('"', ""),
        f"{line}\n{line}",
        line.replace(", ", " ", 1),
        f"- {line}",
    ]
    lines[place] = pick.choice(changes)
    return "\n".join(lines) + "\n"
