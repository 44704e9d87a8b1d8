"""The kinds of conversation that `spechead data synthesize` generates: a table, no code.

A kind steers the target in two ways while it writes the user's message: a system turn that describes the assistant,
and the first words of the message (an empty string leaves these to the target, too). When the target answers, only
the first words remain, as a part of the prompt.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Kind:
    system: str
    openings: tuple[str, ...]
    weight: float  # share of the conversations, relative to the other kinds


KINDS: dict[str, Kind] = {
    "general": Kind(
        "",
        ("", "", "", "What is the best way to", "Can you give me some tips on", "How do I", "List five"),
        1.2,
    ),
    "writing": Kind(
        "You are an AI assistant that writes emails, letters, posts, stories, poems and speeches.",
        (
            "Write a short story about",
            "Write a poem about",
            "Write an email to",
            "Draft a polite letter to",
            "Write a blog post about",
            "Write a product description for",
            "Write a short speech for",
            "Compose a social media post about",
            "Write a review of",
            "Describe a scene in which",
            "Rewrite the following sentence in a more formal tone:",
            "Can you help me write",
            "Write an opening paragraph for",
        ),
        1.2,
    ),
    "roleplay": Kind(
        "You are an AI assistant that plays any character the user asks for and stays in that role.",
        (
            "Pretend you are",
            "You are a pirate captain",
            "Act as a travel guide",
            "Imagine you are",
            "Play the role of",
            "I want you to act as",
            "Let's role-play. You are",
            "You are a medieval knight",
            "Speak as if you were",
            "Act as a job interviewer",
            "You are a famous chef",
            "Pretend to be a",
        ),
        1.1,
    ),
    "reasoning": Kind(
        "You are an AI assistant that solves puzzles and answers questions by step by step reasoning.",
        (
            "If all",
            "Is it possible that",
            "Which is better,",
            "Three friends",
            "What would happen if",
            "Compare",
            "A man",
            "Which of these does not belong:",
            "Is the following argument valid?",
            "Why does",
            "What are the advantages and disadvantages of",
            "Should I",
        ),
        1.1,
    ),
    "maths": Kind(
        "You are an AI assistant that solves maths problems step by step.",
        (
            "A train travels",
            "Sarah has",
            "Calculate",
            "What is the area of",
            "Solve for x:",
            "A store sells",
            "Tom buys",
            "If a car",
            "Find the",
            "What is",
            "How many",
            "A recipe needs",
            "The sum of",
            "What is 15% of",
        ),
        1.1,
    ),
    "coding": Kind(
        "You are an AI assistant that helps programmers with Python, JavaScript, SQL and other languages.",
        (
            "Write a Python function that",
            "Write a Python function to",
            "Write a Python program that",
            "Write a SQL query that",
            "Write a JavaScript function that",
            "How do I",
            "Explain what this Python code does:\n\n```python\n",
            "Write a Python class that",
            "Create a Python script that",
            "What is the difference between",
            "Implement",
            "Write a bash command that",
        ),
        1.4,
    ),
    "extraction": Kind(
        "You are an AI assistant that reads a text and extracts names, dates, places and facts from it.",
        (
            'Extract all the names from the following text:\n\n"Yesterday',
            'Extract the dates and places from this text:\n\n"In',
            "List the key facts in the following paragraph:\n\nThe",
            "Summarize the following text in one sentence:\n\n",
            "Read the following text and answer the question.\n\nText: The",
            "What are the main points of this passage?\n\n",
            'Extract the product names and prices from this text:\n\n"Our store',
            'Find all the numbers in the following sentence:\n\n"',
            "Identify the people mentioned in this passage:\n\nDr.",
            'Classify the sentiment of this review as positive or negative:\n\n"I',
            "Give the following information as a JSON object:\n\nName:",
            "Extract the company, the city and the date from this sentence:\n\nThe company",
            "List the ingredients mentioned in this text:\n\nTo make",
        ),
        1.1,
    ),
    "explanation": Kind(
        "You are an AI assistant that explains science, history and everyday life in simple words.",
        (
            "Explain how",
            "Explain why",
            "Explain the concept of",
            "What is the difference between",
            "How does",
            "Why do",
            "Can you explain",
            "Explain in simple terms what",
            "What causes",
            "Describe the process of",
            "What does the term",
            "Explain to a child",
        ),
        1.2,
    ),
    "translation": Kind(
        "You are an AI assistant that translates English sentences into other languages.",
        (
            'Translate the following sentence into French:\n\n"The',
            'Translate this sentence into Spanish:\n\n"I',
            "Translate into German: We",
            'Translate the following English text to Italian:\n\n"Yesterday',
            'How do you say "I',
            'How do you say "Where',
            'Translate to French: "My',
            'Translate the following sentence to Spanish: "She',
            'Please translate this message into German:\n\n"Dear',
            'Translate this phrase into Spanish and explain it: "Good',
            'Translate the following sentence to French: "The weather',
            'Translate "Thank you',
            'Can you translate this into Portuguese: "They',
        ),
        0.9,
    ),
}
