"""Right answers in other styles, for `test_course_alternatives`; read as text, never imported."""


@answer("tokenizer.best_pair")
def best_pair(tokens: Sequence[str], merges: Merges) -> tuple[str, str] | None:
    best = None
    for index in range(len(tokens) - 1):
        pair = (tokens[index], tokens[index + 1])
        if pair in merges and (best is None or merges[pair] < merges[best]):
            best = pair
    return best


@answer("tokenizer.best_pair")
def best_pair(tokens, merges):
    known = [(merges[pair], pair) for pair in zip(tokens, tokens[1:]) if pair in merges]
    if not known:
        return None
    return sorted(known)[0][1]


@answer("tokenizer.merge_pair")
def merge_pair(tokens: Sequence[str], pair: tuple[str, str]) -> list[str]:
    merged = []
    index = 0
    while index < len(tokens):
        if tuple(tokens[index : index + 2]) == pair:
            merged.append("".join(pair))
            index += 2
        else:
            merged.append(tokens[index])
            index += 1
    return merged


@answer("tokenizer.merge_pair")
def merge_pair(tokens, pair):
    rest = list(tokens)
    merged = []
    while rest:
        token = rest.pop(0)
        if rest and (token, rest[0]) == tuple(pair):
            token += rest.pop(0)
        merged.append(token)
    return merged


@answer("tokenizer.encode_word")
def encode_word(word: Iterable[str], merges: Merges) -> list[str]:
    tokens = []
    tokens.extend(word)
    while True:
        pair = best_pair(tokens, merges)
        if pair is None:
            return tokens
        tokens = merge_pair(tokens, pair)


@answer("tokenizer.encode_word")
def encode_word(word, merges):
    def joined(tokens):
        pair = best_pair(tokens, merges)
        return tokens if pair is None else joined(merge_pair(tokens, pair))

    return joined(list(word))


@answer("tokenizer.Tokenizer.encode")
def encode(
    self, text: str, *, parse_special: bool = False, add_special_tokens: bool = True
) -> list[int]:
    checked_text(text)
    pattern, known = self.all_added if parse_special else self.plain_added
    ids = list(self.file.prefix_ids) if add_special_tokens else []
    for piece in split_at_tokens(text, pattern, known):
        if isinstance(piece, str):
            ids.extend(self.text_ids(piece))
        else:
            ids.append(piece)
    if add_special_tokens:
        ids.extend(self.file.suffix_ids)
    return ids


@answer("tokenizer.unfinished_bytes")
def unfinished_bytes(data: bytes) -> int:
    for size, byte in enumerate(reversed(data[-3:]), 1):
        if needed := character_size(byte):
            return size if needed > size else 0
    return 0


@answer("tokenizer.Detokenizer.push")
def push(self, token_id: int) -> str:
    text = ""
    if token_id not in self.skipped_ids:
        data = b"".join([self.held, self.tokenizer.token_bytes(token_id)])
        size = unfinished_bytes(data)
        self.held = data[len(data) - size :]
        text = data[: len(data) - size].decode(errors="replace")
    return text


@answer("tokenizer.unfinished_bytes")
def unfinished_bytes(data: bytes) -> int:
    import codecs

    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    decoder.decode(data)
    return len(decoder.getstate()[0])


@answer("tokenizer.Detokenizer.push")
def push(self, token_id):
    import codecs

    if token_id in self.skipped_ids:
        return ""
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    decoder.setstate((self.held, 0))
    text = decoder.decode(self.tokenizer.token_bytes(token_id))
    self.held = decoder.getstate()[0]
    return text


@answer("tokenizer.encode_word")
def encode_word(word, merges):
    tokens = [*word]
    for _ in range(len(tokens)):
        pair = best_pair(tokens, merges)
        if pair is None:
            break
        tokens = merge_pair(tokens, pair)
    return tokens


@answer("tokenizer.Tokenizer.encode")
def encode(self, text, *, parse_special=False, add_special_tokens=True):
    from itertools import chain

    checked_text(text)
    found = split_at_tokens(text, *(self.all_added if parse_special else self.plain_added))
    parts = [self.text_ids(piece) if isinstance(piece, str) else [piece] for piece in found]
    if add_special_tokens:
        parts = [self.file.prefix_ids, *parts, self.file.suffix_ids]
    return list(chain.from_iterable(parts))
