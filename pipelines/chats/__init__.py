"""From chats in files to packed rows, in parts that know nothing of each other's business.

records.py    one parsed object -> a chat, in any of the accepted shapes; a bad one is `Rejected` with its reason
sources.py    what --data names -> files, cut into shards
lines.py      a shard -> numbered records; what cannot be read is rejected line by line
template.py   a chat -> tokens, and which of them the assistant wrote
over_long.py  a document longer than a row -> pieces
pack.py       lengths -> which document lies in which row, and where
documents.py  the tokenized documents of a shard, on disk between reading and packing
rows.py       a packing plan and the documents -> the packed rows
"""
