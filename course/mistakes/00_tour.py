"""Wrong answers that people really give, each with the words that its check must say.

Read as text, never imported. Above each stands the rule of the lesson that the answer breaks.
"""

# -- percentile --


# rule 1
@mistake(
    "bench_results.percentile", "the 0th is the smallest, wherever it stands: do you sort first?"
)
def percentile(values: Sequence[float], percent: float) -> float:
    if not values:
        raise ValueError("there is no percentile of 0 values")
    place = (len(values) - 1) * percent / 100
    low = int(place)
    high = min(low + 1, len(values) - 1)
    return values[low] + (values[high] - values[low]) * (place - low)


# rule 1
@mistake("bench_results.percentile", "the caller's list has changed: do you sort it, or a copy?")
def percentile(values: Sequence[float], percent: float) -> float:
    if not values:
        raise ValueError("there is no percentile of 0 values")
    values.sort()
    place = (len(values) - 1) * percent / 100
    low = int(place)
    high = min(low + 1, len(values) - 1)
    return values[low] + (values[high] - values[low]) * (place - low)


# rule 1
@mistake(
    "bench_results.percentile",
    "a value is None: `sort`, `append` and a function without `return` give None",
)
def percentile(values: Sequence[float], percent: float) -> float:
    if not values:
        raise ValueError("there is no percentile of 0 values")
    ordered = values.sort()
    place = (len(ordered) - 1) * percent / 100
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


# rule 2
@mistake("bench_results.percentile", "4 values have 3 steps between them")
def percentile(values: Sequence[float], percent: float) -> float:
    if not values:
        raise ValueError("there is no percentile of 0 values")
    return sorted(values)[int(len(values) * percent / 100)]


# rule 2
@mistake(
    "bench_results.percentile",
    "a place outside of the list: does the last element have a neighbour",
)
def percentile(values: Sequence[float], percent: float) -> float:
    if not values:
        raise ValueError("there is no percentile of 0 values")
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


# rule 2
@mistake(
    "bench_results.percentile",
    "a place outside of the list: does the last element have a neighbour",
)
def percentile(values: Sequence[float], percent: float) -> float:
    if not values:
        raise ValueError("there is no percentile of 0 values")
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    low = int(place)
    return ordered[low] + (ordered[low + 1] - ordered[low]) * (place - low)


# rule 2
@mistake("bench_results.percentile", "3 stands in the middle: do you look at places?")
def percentile(values: Sequence[float], percent: float) -> float:
    if not values:
        raise ValueError("there is no percentile of 0 values")
    low, high = min(values), max(values)
    return low + (high - low) * percent / 100


# rule 3
@mistake("bench_results.percentile", "4 values have 3 steps between them")
def percentile(values: Sequence[float], percent: float) -> float:
    if not values:
        raise ValueError("there is no percentile of 0 values")
    ordered = sorted(values)
    return ordered[int((len(ordered) - 1) * percent / 100)]


# rule 3
@mistake("bench_results.percentile", "4 values have 3 steps between them")
def percentile(values: Sequence[float], percent: float) -> float:
    if not values:
        raise ValueError("there is no percentile of 0 values")
    ordered = sorted(values)
    return ordered[round((len(ordered) - 1) * percent / 100)]


# rule 3
@mistake("bench_results.percentile", "do you take the middle?")
def percentile(values: Sequence[float], percent: float) -> float:
    if not values:
        raise ValueError("there is no percentile of 0 values")
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    low, high = int(place), -(-place // 1)
    return (ordered[low] + ordered[int(high)]) / 2


# rule 3
@mistake(
    "bench_results.percentile",
    "the 0th is the smallest, wherever it stands: do you sort first?",
)
def percentile(values: Sequence[float], percent: float) -> float:
    if not values:
        raise ValueError("there is no percentile of 0 values")
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    low, high = int(place // 1), int(-(-place // 1))
    return ordered[low] * (high - place) + ordered[high] * (place - low)


# rule 2
@mistake(
    "bench_results.percentile",
    "the 0th is the smallest, wherever it stands: do you sort first?",
)
def percentile(values: Sequence[float], percent: float) -> float:
    if not values:
        raise ValueError("there is no percentile of 0 values")
    return sorted(values)[len(values) // 2]


# rule 4
@mistake("bench_results.percentile", "no values: do you raise a ValueError before all else?")
def percentile(values: Sequence[float], percent: float) -> float:
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


# rule 4
@mistake("bench_results.percentile", "no values: do you raise a ValueError before all else?")
def percentile(values: Sequence[float], percent: float) -> float:
    if not values:
        return 0.0
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


# rule 2
@mistake(
    "bench_results.percentile", "1 was measured three times: does each of the three take a place?"
)
def percentile(values: Sequence[float], percent: float) -> float:
    if not values:
        raise ValueError("there is no percentile of 0 values")
    ordered = sorted(set(values))
    place = (len(ordered) - 1) * percent / 100
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


# rule 2
@mistake("bench_results.percentile", "do you round, or leave the float as it is?")
def percentile(values: Sequence[float], percent: float) -> float:
    if not values:
        raise ValueError("there is no percentile of 0 values")
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return round(ordered[low] + (ordered[high] - ordered[low]) * (place - low), 2)
