"""A few made-up items of the six tasks, in the format of the real files, for the scale `smoke`."""

from typing import Any

QUESTIONS: list[dict[str, Any]] = [
    {"question": "What falls from clouds?", "choices": ["rain", "sand", "iron", "wood"], "gold": 0},
    {"question": "Which of them is cold?", "choices": ["fire", "the sun", "ice", "tea"], "gold": 2},
    {"question": "Where do fish live?", "choices": ["trees", "water", "nests", "air"], "gold": 1},
]
MADE_UP: dict[str, list[dict[str, Any]]] = {
    "lambada_test.jsonl": [
        {"text": "The dog saw the cat and barked. The cat ran away from the dog"},
        {"text": "She lost her key and could not open the door without the key"},
        {"text": "He fed the horse every morning, and every morning he rode the horse"},
    ],
    "hellaswag_val.jsonl": [
        {
            "activity_label": "Making tea",
            "ctx_a": "A woman boils water.",
            "ctx_b": "she",
            "endings": ["pours it over the tea.", "rides it.", "reads it aloud.", "paints a wall."],
            "label": 0,
        },
        {
            "activity_label": "Football",
            "ctx_a": "A boy runs to the ball.",
            "ctx_b": "he",
            "endings": ["eats a spoon.", "kicks it to a friend.", "is a river.", "bakes it."],
            "label": 1,
        },
        {
            "activity_label": "Washing a car",
            "ctx_a": "A man fills a bucket.",
            "ctx_b": "then",
            "endings": ["he flies.", "the bucket sings.", "it is 1850.", "he washes his car."],
            "label": 3,
        },
    ],
    "piqa_valid.jsonl": [
        {
            "goal": "Dry a shirt",
            "sol1": "Hang it in the sun.",
            "sol2": "Put it in water.",
            "label": 0,
        },
        {"goal": "Cut paper", "sol1": "Use a spoon.", "sol2": "Use scissors.", "label": 1},
        {"goal": "Cool a drink", "sol1": "Add ice.", "sol2": "Add salt.", "label": 0},
    ],
    "arc_easy_test.jsonl": QUESTIONS,
    "arc_challenge_test.jsonl": QUESTIONS[::-1],
    "winogrande_dev.jsonl": [
        {
            "sentence": "The cup did not fit in the bag because the _ was too small.",
            "option1": "cup",
            "option2": "bag",
            "answer": "2",
        },
        {
            "sentence": "Ann asked Sue for help because _ knew the way.",
            "option1": "Sue",
            "option2": "Ann",
            "answer": "1",
        },
        {
            "sentence": "The stone broke the glass because the _ was thin.",
            "option1": "stone",
            "option2": "glass",
            "answer": "2",
        },
    ],
}
