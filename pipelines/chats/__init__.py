"""From chats in files to packed rows, in parts that know nothing of each other's business.

refusal.py     why a record cannot be used
tools.py       tools and their calls, in OpenAI's form
records.py     one parsed object -> a chat, in any of the accepted shapes
sources.py     what --data names -> files, cut into shards
lines.py       a shard -> numbered records; what cannot be read is rejected line by line
render.py      a chat -> text, and what of it the assistant wrote
template.py    that text -> tokens
over_long.py   a document longer than a row -> pieces
publishing.py  files that appear whole or not at all
documents.py   the tokenized documents of a shard, on disk between reading and packing
mixture.py     lengths -> how often each document is taken
pack.py        lengths -> which document lies in which row, and where
rows.py        a packing plan and the documents -> the packed rows
stages.py      the two Ray Data stages around these
statistics.py  the figures; histogram.py, page.py and report.py show them; rejects.py lists what was left out
"""
