"""Wrong answers that people really give, each with the words that its check must say.

Read as text, never imported: the names in the bodies are those of `minivllm/tokenizer.py`.
The comment above each names the rule of the lesson it breaks.
"""

# -- best_pair --


# rule 2
@mistake(
    "tokenizer.best_pair",
    "l, o has rank 0 and e, r has rank 2: do you return the first pair that you find?",
)
def best_pair(tokens: Sequence[str], merges: Merges) -> tuple[str, str] | None:
    for pair in zip(tokens, tokens[1:]):
        if pair in merges:
            return pair
    return None


# rule 2
@mistake(
    "tokenizer.best_pair",
    "l, o has rank 0 and e, r has rank 2: do you return the first pair that you find?",
)
def best_pair(tokens: Sequence[str], merges: Merges) -> tuple[str, str] | None:
    pairs = [pair for pair in zip(tokens, tokens[1:]) if merges.get(pair)]
    return min(pairs, key=merges.get, default=None)


# rule 4
@mistake("tokenizer.best_pair", "w, o has no rank: do you return it anyway?")
def best_pair(tokens: Sequence[str], merges: Merges) -> tuple[str, str] | None:
    pairs = zip(tokens, tokens[1:])
    return min(pairs, key=lambda pair: merges.get(pair, float("inf")), default=None)


# rule 4
@mistake("tokenizer.best_pair", "no pairs here: does your code raise, such as min() of nothing?")
def best_pair(tokens: Sequence[str], merges: Merges) -> tuple[str, str] | None:
    best = min(zip(tokens, tokens[1:]), key=lambda pair: merges.get(pair, float("inf")))
    return best if best in merges else None


# rule 2
@mistake(
    "tokenizer.best_pair",
    "a value is None: `sort`, `append` and a function without `return` give None",
)
def best_pair(tokens: Sequence[str], merges: Merges) -> tuple[str, str] | None:
    return min(zip(tokens, tokens[1:]), key=merges.get, default=None)


# rule 2
@mistake("tokenizer.best_pair", "do you look at the pair that starts at every place?")
def best_pair(tokens: Sequence[str], merges: Merges) -> tuple[str, str] | None:
    pairs = [pair for pair in zip(tokens[::2], tokens[1::2]) if pair in merges]
    return min(pairs, key=merges.__getitem__, default=None)


# rule 2
@mistake("tokenizer.best_pair", "1 is lower than 5: do you go by the order of the dict's entries?")
def best_pair(tokens: Sequence[str], merges: Merges) -> tuple[str, str] | None:
    pairs = set(zip(tokens, tokens[1:]))
    return next((pair for pair in merges if pair in pairs), None)


# -- merge_pair --


# rule 3
@mistake(
    "tokenizer.merge_pair",
    "each token is joined at most once, from the left: do you skip both after a join?",
)
def merge_pair(tokens: Sequence[str], pair: tuple[str, str]) -> list[str]:
    merged = list(tokens[:1])
    for left, right in zip(tokens, tokens[1:]):
        if (left, right) == pair:
            merged[-1] = left + right
        else:
            merged.append(right)
    return merged


# rule 3
@mistake("tokenizer.merge_pair", "l, o occurs twice: do you stop after the first?")
def merge_pair(tokens: Sequence[str], pair: tuple[str, str]) -> list[str]:
    for place, neighbours in enumerate(zip(tokens, tokens[1:])):
        if neighbours == pair:
            return [*tokens[:place], "".join(pair), *tokens[place + 2 :]]
    return list(tokens)


# rule 3
@mistake("tokenizer.merge_pair", "aa is not a: do you search in the joined text?")
def merge_pair(tokens: Sequence[str], pair: tuple[str, str]) -> list[str]:
    return " ".join(tokens).replace(" ".join(pair), "".join(pair)).split()


# rule 3
@mistake("tokenizer.merge_pair", "no l, o here, so no join")
def merge_pair(tokens: Sequence[str], pair: tuple[str, str]) -> list[str]:
    merged, place = [], 0
    while place < len(tokens) - 1:
        found = (tokens[place], tokens[place + 1]) == pair
        merged.append("".join(pair) if found else tokens[place])
        place += 2 if found else 1
    return merged


# rule 3
@mistake(
    "tokenizer.merge_pair",
    "a place outside of the list: does the last element have a neighbour",
)
def merge_pair(tokens: Sequence[str], pair: tuple[str, str]) -> list[str]:
    merged = list(tokens)
    for place in range(len(merged) - 1):
        if (merged[place], merged[place + 1]) == pair:
            merged[place : place + 2] = ["".join(pair)]
    return merged


# rule 3
@mistake("tokenizer.merge_pair", "l, x is not the pair: do you compare only the first token?")
def merge_pair(tokens: Sequence[str], pair: tuple[str, str]) -> list[str]:
    merged = []
    place = 0
    while place < len(tokens):
        if tokens[place] == pair[0] and place + 1 < len(tokens):
            merged.append(tokens[place] + tokens[place + 1])
            place += 2
        else:
            merged.append(tokens[place])
            place += 1
    return merged


# rule 3
@mistake("tokenizer.merge_pair", "do you compare the tokens or the joined text?")
def merge_pair(tokens: Sequence[str], pair: tuple[str, str]) -> list[str]:
    merged = []
    place = 0
    while place < len(tokens):
        if place + 1 < len(tokens) and tokens[place] + tokens[place + 1] == "".join(pair):
            merged.append("".join(pair))
            place += 2
        else:
            merged.append(tokens[place])
            place += 1
    return merged


# rule 3
@mistake("tokenizer.merge_pair", "x, o is not the pair: do you compare only the second token?")
def merge_pair(tokens: Sequence[str], pair: tuple[str, str]) -> list[str]:
    merged: list[str] = []
    joined = True
    for token in tokens:
        if token == pair[1] and not joined:
            merged[-1] += token
            joined = True
        else:
            merged.append(token)
            joined = False
    return merged


# -- encode_word --


# rule 4
@mistake(
    "tokenizer.encode_word",
    "lo, w is a pair once l, o is joined: do you continue until no pair is left?",
)
def encode_word(word: Iterable[str], merges: Merges) -> list[str]:
    tokens = list(word)
    pair = best_pair(tokens, merges)
    if pair is not None:
        tokens = merge_pair(tokens, pair)
    return tokens


# rule 2
@mistake(
    "tokenizer.encode_word",
    "b, c has rank 0, and after that no pair is left: do you look for the longest token?",
)
def encode_word(word: Iterable[str], merges: Merges) -> list[str]:
    known = {left + right for left, right in merges}
    characters, tokens, start = list(word), [], 0
    while start < len(characters):
        end = len(characters)
        while end > start + 1 and "".join(characters[start:end]) not in known:
            end -= 1
        tokens.append("".join(characters[start:end]))
        start = end
    return tokens


# rule 4
@mistake("tokenizer.encode_word", "is each new value kept?")
def encode_word(word: Iterable[str], merges: Merges) -> list[str]:
    tokens = list(word)
    while (pair := best_pair(tokens, merges)) is not None:
        merge_pair(tokens, pair)
    return tokens


# rule 4: right for tables in which each pair comes after those that make its tokens
@mistake(
    "tokenizer.encode_word",
    "after a, b is joined, ab, c is a pair: do you go through the merges only once?",
)
def encode_word(word: Sequence[str], merges: Merges) -> list[str]:
    tokens = list(word)
    for pair in sorted(merges, key=merges.get):
        tokens = merge_pair(tokens, pair)
    return tokens


# rule 4
@mistake("tokenizer.encode_word", "a word may be a list of tokens: do you treat it as one text?")
def encode_word(word: Iterable[str], merges: Merges) -> list[str]:
    tokens = list("".join(word))
    while (pair := best_pair(tokens, merges)) is not None:
        tokens = merge_pair(tokens, pair)
    return tokens


# -- Tokenizer.encode --


# rule 5
@mistake(
    "tokenizer.Tokenizer.encode",
    "a user typed <e>: do you look for special tokens although parse_special is False?",
)
def encode(
    self, text: str, *, parse_special: bool = False, add_special_tokens: bool = True
) -> list[int]:
    checked_text(text)
    ids: list[int] = []
    for piece in split_at_tokens(text, *self.all_added):
        ids += [piece] if isinstance(piece, int) else self.text_ids(piece)
    return [*self.file.prefix_ids, *ids, *self.file.suffix_ids] if add_special_tokens else ids


# rule 5
@mistake(
    "tokenizer.Tokenizer.encode",
    "<t> is an added token and not special: do you look for added tokens at all?",
)
def encode(
    self, text: str, *, parse_special: bool = False, add_special_tokens: bool = True
) -> list[int]:
    checked_text(text)
    ids: list[int] = []
    for piece in split_at_tokens(text, *self.all_added) if parse_special else [text]:
        ids += [piece] if isinstance(piece, int) else self.text_ids(piece)
    return [*self.file.prefix_ids, *ids, *self.file.suffix_ids] if add_special_tokens else ids


# rule 5
@mistake(
    "tokenizer.Tokenizer.encode", "add_special_tokens=False: do you add prefix and suffix anyway?"
)
def encode(
    self, text: str, *, parse_special: bool = False, add_special_tokens: bool = True
) -> list[int]:
    checked_text(text)
    ids: list[int] = []
    added = self.all_added if parse_special else self.plain_added
    for piece in split_at_tokens(text, *added):
        ids += [piece] if isinstance(piece, int) else self.text_ids(piece)
    return [*self.file.prefix_ids, *ids, *self.file.suffix_ids]


# rule 5
@mistake("tokenizer.Tokenizer.encode", "prefix 1 and suffix 2: is each there, and only once?")
def encode(
    self, text: str, *, parse_special: bool = False, add_special_tokens: bool = True
) -> list[int]:
    checked_text(text)
    ids: list[int] = []
    added = self.all_added if parse_special else self.plain_added
    for piece in split_at_tokens(text, *added):
        piece_ids = [piece] if isinstance(piece, int) else self.text_ids(piece)
        if add_special_tokens:
            piece_ids = [*self.file.prefix_ids, *piece_ids, *self.file.suffix_ids]
        ids += piece_ids
    return ids


# rule 5
@mistake(
    "tokenizer.Tokenizer.encode",
    "the ids are one flat list: is yours nested, or something other than a list?",
)
def encode(
    self, text: str, *, parse_special: bool = False, add_special_tokens: bool = True
) -> list[int]:
    checked_text(text)
    ids: list[int] = []
    added = self.all_added if parse_special else self.plain_added
    for piece in split_at_tokens(text, *added):
        ids.append(piece if isinstance(piece, int) else self.text_ids(piece))
    return [*self.file.prefix_ids, *ids, *self.file.suffix_ids] if add_special_tokens else ids


# rule 5
@mistake(
    "tokenizer.Tokenizer.encode",
    "an argument is missing: does a tuple that holds two of them need a `*` before",
)
def encode(
    self, text: str, *, parse_special: bool = False, add_special_tokens: bool = True
) -> list[int]:
    checked_text(text)
    ids: list[int] = []
    for piece in split_at_tokens(text, self.all_added if parse_special else self.plain_added):
        ids += [piece] if isinstance(piece, int) else self.text_ids(piece)
    return [*self.file.prefix_ids, *ids, *self.file.suffix_ids] if add_special_tokens else ids


# rule 5
@mistake("tokenizer.Tokenizer.encode", "<e> has id 0 here: does your code treat 0 as missing?")
def encode(
    self, text: str, *, parse_special: bool = False, add_special_tokens: bool = True
) -> list[int]:
    checked_text(text)
    ids: list[int] = []
    added = self.all_added if parse_special else self.plain_added
    for piece in split_at_tokens(text, *added):
        if piece:
            ids += [piece] if isinstance(piece, int) else self.text_ids(piece)
    return [*self.file.prefix_ids, *ids, *self.file.suffix_ids] if add_special_tokens else ids


# rule 5
@mistake(
    "tokenizer.Tokenizer.encode",
    "the text starts and ends with <e>, and <e> is also prefix and suffix: are all four there?",
)
def encode(
    self, text: str, *, parse_special: bool = False, add_special_tokens: bool = True
) -> list[int]:
    checked_text(text)
    ids: list[int] = []
    added = self.all_added if parse_special else self.plain_added
    for piece in split_at_tokens(text, *added):
        ids += [piece] if isinstance(piece, int) else self.text_ids(piece)
    prefix_ids = list(self.file.prefix_ids)
    if add_special_tokens and ids[: len(prefix_ids)] != prefix_ids:
        ids = prefix_ids + ids
    return [*ids, *self.file.suffix_ids] if add_special_tokens else ids


# rule 1
@mistake(
    "tokenizer.Tokenizer.encode", "spaces and line ends are text: do you strip or replace any?"
)
def encode(
    self, text: str, *, parse_special: bool = False, add_special_tokens: bool = True
) -> list[int]:
    text = checked_text(text) or text.strip()
    ids: list[int] = []
    added = self.all_added if parse_special else self.plain_added
    for piece in split_at_tokens(text, *added):
        ids += [piece] if isinstance(piece, int) else self.text_ids(piece)
    return [*self.file.prefix_ids, *ids, *self.file.suffix_ids] if add_special_tokens else ids


# rule 1
@mistake("tokenizer.Tokenizer.encode", "do you change the text before encoding it?")
def encode(
    self, text: str, *, parse_special: bool = False, add_special_tokens: bool = True
) -> list[int]:
    from unicodedata import normalize

    checked_text(text)
    ids: list[int] = []
    added = self.all_added if parse_special else self.plain_added
    for piece in split_at_tokens(normalize("NFC", text), *added):
        ids += [piece] if isinstance(piece, int) else self.text_ids(piece)
    return [*self.file.prefix_ids, *ids, *self.file.suffix_ids] if add_special_tokens else ids


# -- unfinished_bytes --


# rule 6
@mistake(
    "tokenizer.unfinished_bytes",
    "the last character is complete: do you compare its bytes with how many it needs?",
)
def unfinished_bytes(data: bytes) -> int:
    for size in range(1, min(3, len(data)) + 1):
        if character_size(data[-size]) > 1:
            return size
    return 0


# rule 6
@mistake(
    "tokenizer.unfinished_bytes",
    "3 of the 4 bytes of an emoji are here: do you count the missing byte or the waiting ones?",
)
def unfinished_bytes(data: bytes) -> int:
    for size in range(1, min(3, len(data)) + 1):
        if needed := character_size(data[-size]):
            return max(0, needed - size)
    return 0


# rule 7
@mistake("tokenizer.unfinished_bytes", "these bytes start no character: would they wait forever?")
def unfinished_bytes(data: bytes) -> int:
    for size in range(min(4, len(data) + 1)):
        try:
            data[: len(data) - size].decode()
            return size
        except UnicodeDecodeError:
            continue
    return 0


# rule 6
@mistake(
    "tokenizer.unfinished_bytes",
    "3 of the 4 bytes of an emoji are here: do you count the missing byte",
)
def unfinished_bytes(data: bytes) -> int:
    return 1 if data and character_size(data[-1]) > 1 else 0


# rule 6
@mistake(
    "tokenizer.unfinished_bytes",
    "A doesn't continue E2, so E2 is lost: do you stop at the last character's first byte?",
)
def unfinished_bytes(data: bytes) -> int:
    for size in (3, 2, 1):
        if size <= len(data) and character_size(data[-size]) > size:
            return size
    return 0


# rule 6
@mistake(
    "tokenizer.unfinished_bytes", "this byte occurs in no character: do you ask character_size?"
)
def unfinished_bytes(data: bytes) -> int:
    for size, byte in enumerate(reversed(data[-3:]), start=1):
        if byte & 0b1100_0000 == 0b1000_0000:
            continue
        if byte < 0x80 or byte > 0xF7:
            return 0
        needed = 2 if byte < 0xE0 else 3 if byte < 0xF0 else 4
        return size if size < needed else 0
    return 0


# -- Detokenizer.push --


# rules 1 and 6
@mistake(
    "tokenizer.Detokenizer.push",
    "é in two tokens, 한 in three: do you put the held bytes before the new ones?",
)
def push(self, token_id: int) -> str:
    if token_id in self.skipped_ids:
        return ""
    return self.tokenizer.token_bytes(token_id).decode("utf-8", "replace")


# rule 6
@mistake(
    "tokenizer.Detokenizer.push", "low is complete, C3 isn't: do you hold back the whole token?"
)
def push(self, token_id: int) -> str:
    if token_id in self.skipped_ids:
        return ""
    data = self.held + self.tokenizer.token_bytes(token_id)
    if unfinished_bytes(data):
        self.held = data
        return ""
    self.held = b""
    return data.decode("utf-8", "replace")


# rule 7
@mistake(
    "tokenizer.Detokenizer.push",
    "FF, and a C3 without its A9, become one U+FFFD each: is one missing, or there twice?",
)
def push(self, token_id: int) -> str:
    if token_id in self.skipped_ids:
        return ""
    data = self.held + self.tokenizer.token_bytes(token_id)
    end = len(data) - unfinished_bytes(data)
    self.held = data[end:]
    return data[:end].decode("utf-8", "ignore")


# rule 7
@mistake(
    "tokenizer.Detokenizer.push",
    "low is complete, C3 isn't: do you hold back the whole token?",
)
def push(self, token_id: int) -> str:
    if token_id in self.skipped_ids:
        return ""
    data = self.held + self.tokenizer.token_bytes(token_id)
    text = data.decode("utf-8", "replace")
    if text.endswith("\ufffd"):
        self.held = data
        return ""
    self.held = b""
    return text


# rule 7
@mistake(
    "tokenizer.Detokenizer.push",
    "<e> is skipped, even between the halves of é: do you check skipped_ids first?",
)
def push(self, token_id: int) -> str:
    if token_id in self.skipped_ids:
        return self.finish()
    data = self.held + self.tokenizer.token_bytes(token_id)
    end = len(data) - unfinished_bytes(data)
    self.held = data[end:]
    return data[:end].decode("utf-8", "replace")


# rule 6
@mistake("tokenizer.Detokenizer.push", "é in two tokens, 한 in three")
def push(self, token_id: int) -> str:
    if token_id in self.skipped_ids:
        return ""
    data = self.held + self.tokenizer.token_bytes(token_id)
    size = unfinished_bytes(data)
    self.held = data[-size:]
    return data[:-size].decode("utf-8", "replace")


# rule 7
@mistake(
    "tokenizer.Detokenizer.push",
    "each token is complete text: do you strip or replace anything?",
)
def push(self, token_id: int) -> str:
    if token_id in self.skipped_ids:
        return ""
    data = self.held + self.tokenizer.token_bytes(token_id)
    end = len(data) - unfinished_bytes(data)
    self.held = data[end:]
    return "".join(data[:end].decode("utf-8", "replace").splitlines(keepends=False))


# rule 7
@mistake(
    "tokenizer.Detokenizer.push",
    "FF, and a C3 without its A9, become one U+FFFD each: is one missing, or there twice?",
)
def push(self, token_id: int) -> str:
    if token_id in self.skipped_ids:
        return ""
    data = self.held + self.tokenizer.token_bytes(token_id)
    end = len(data) - unfinished_bytes(data)
    self.held = data[end:]
    return data[:end].decode("utf-8", "replace").rstrip("\ufffd")
