"""Makes seed_tts_pairs.json: pairs of texts with their error by Seed-TTS-eval's published rule.

Written from the rule's description alone and independent of the code under test: it imports nothing of the
project, deletes the punctuation character by character from a list typed here (zhon 2.1.1's and ASCII's, without
the apostrophe), and counts errors with a plain edit-distance table of its own.
"""

import json
from pathlib import Path

ASCII = "!\"#$%&()*+,-./:;<=>?@[\\]^_`{|}~"
CHINESE = (
    "＂＃＄％＆＇（）＊＋，－／：；＜＝＞＠［＼］＾＿｀｛｜｝～｟｠｢｣､\u3000、"
    "〃〈〉《》「」『』【】〔〕〖〗〘〙〚〛〜〝〞〟〰〾〿–—‘’‛“”„‟…‧﹏﹑﹔·．！？｡。"
)

PAIRS = [
    # language, reference, hypothesis
    ("zh", "今天天气很好。", "今天天气很好"),
    ("zh", "今天天气很好。", "今天天很好"),
    ("zh", "今天天气很好。", "今天天气很好啊"),
    ("zh", "今天天气很好。", "今天天汽很好"),
    ("zh", "今天天气很好。", ""),
    ("zh", "好。", "你好吗朋友"),
    ("zh", "他在哪儿？", "他在哪"),
    ("zh", "他说：“我不去！”", "他说我不去"),
    ("zh", "《红楼梦》、《西游记》……都看过。", "红楼梦西游记都看过"),
    ("zh", "一百二十三", "123"),
    ("zh", "2024年", "二零二四年"),
    ("zh", "打开WiFi", "打开wifi"),
    ("zh", "打开 Wi-Fi 吧", "打开WiFi吧"),
    ("zh", "It's 好的", "its好的"),
    ("zh", "我的 iPhone 坏了", "我的 iPhone 坏了"),
    ("zh", "我　们", "我们"),
    ("zh", "增长了3.5%", "增长了百分之三点五"),
    ("zh", "四是四，十是十", "十是十四是四"),
    ("zh", "吃葡萄不吐葡萄皮", "吃葡萄不吐葡萄皮吃葡萄不吐葡萄皮"),
    ("zh", "北京—上海", "北京上海"),
    ("zh", "约翰·史密斯", "约翰史密斯"),
    ("zh", "你好世界", "世界你好"),
    ("zh", "这是一个比较长的句子，用来检查替换、删除和插入。", "这是个比较长长的句字用来检查替换删除插入了"),
    ("en", "Hello, world!", "hello world"),
    ("en", "Hello, world!", "hello word"),
    ("en", "It's a well-known fact.", "it's a wellknown fact"),
    ("en", "It's a well-known fact.", "its a well known fact"),
    ("en", "The quick brown fox", "the quick fox"),
    ("en", "The quick brown fox", "the the quick brown fox"),
    ("en", "Yes.", "no no no"),
    ("en", "He said: \"I don't know\".", "he said i don't know"),
    ("en", "U.S.A. wins 3-1", "usa wins 31"),
    ("en", "U.S.A. wins 3-1", "u s a wins three one"),
    ("en", "a b c d", ""),
    ("en", "one  two   three", "one two three"),
    ("en", "Mr. Smith’s dog", "mr smiths dog"),
    ("en", "to be or not to be", "be to or to not be"),
]


def units(text, language):
    for mark in ASCII + CHINESE:
        text = text.replace(mark, "")
    if language == "zh":
        return [c for c in text if c != " "]
    return [word for word in text.lower().split(" ") if word]


def distance(a, b):
    table = [[i + j if i * j == 0 else 0 for j in range(len(b) + 1)] for i in range(len(a) + 1)]
    for i in range(1, len(a) + 1):
        for j in range(1, len(b) + 1):
            change = table[i - 1][j - 1] + (a[i - 1] != b[j - 1])
            table[i][j] = min(change, table[i - 1][j] + 1, table[i][j - 1] + 1)
    return table[-1][-1]


if __name__ == "__main__":
    rows = []
    for language, reference, hypothesis in PAIRS:
        a, b = units(reference, language), units(hypothesis, language)
        rows.append(
            {"language": language, "reference": reference, "hypothesis": hypothesis,
             "errors": distance(a, b), "n_ref": len(a)}
        )
    lines = ",\n".join(json.dumps(row, ensure_ascii=False) for row in rows)
    Path(__file__).with_name("seed_tts_pairs.json").write_text(f"[\n{lines}\n]\n", encoding="utf-8")
