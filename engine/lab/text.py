"""A text to measure on where nobody brings one: written for this purpose, free for any use (CC0)."""

from __future__ import annotations

TEXT = """\
How a sheet becomes a book

A book begins as a pile of large sheets. On each of them the printer puts several pages, some of them upside down, \
in an order that looks like a mistake until the sheet is folded. Fold it once and there are two leaves and four \
pages: that is a folio, the largest kind of book. Fold it a second time, across the first fold, and there are four \
leaves and eight pages: a quarto. Fold it a third time and there are eight leaves and sixteen pages: an octavo, \
which is about as large as most of the books that people hold in their hands today. The names are Latin, and they \
count leaves. Nobody who reads a novel on a train needs to know them, but whoever makes books has to think in folds \
from the first day.

Consider what the folds do to the order of the pages. If you take a sheet, fold it three times, and number the \
pages before you cut the edges, you will find, when you open the sheet again, that page one lies beside page \
sixteen, and that page eight stands on its head above page one. A printer who forgets this prints a book in which \
the hero dies before he is born. So printers made themselves small models of folded paper, with the numbers written \
by hand, and kept them in a drawer. A model of this kind is called a dummy. It costs nothing, and it answers every \
question about the order of the pages at once, because it is not a description of the book but the book itself, \
only smaller and without words.

When the sheets are printed and dry, they are folded by hand with a flat piece of bone. The bone is moved from the \
middle of the fold to its ends, so that the air goes out and the paper does not wrinkle. A good folder works \
through three or four hundred sheets in an hour and does not look at her hands. She looks at the last line of one \
page and the first line of the page beside it: if they stand at the same height, the fold is true. Then the folded \
sheets, which are now called sections, are laid on a long table in their order, and somebody walks along the table \
and takes one from each pile. At the end of the walk he holds a whole book, without a cover and without a spine, \
and begins again at the other end.

How does he know that he has not taken two of one kind, or none of another? In the old days a letter stood at the \
foot of the first page of each section: A, B, C, and so on, and then AA, BB, CC. The binder ran his thumb over the \
corners and read the alphabet. Later somebody had a better idea. A small black bar was printed on the outer fold of \
each section, a little lower on each one than on the one before. When the sections lie in the right order, the bars \
make a stair down the back of the book, and a missing section is a missing step. A child can see it from the other \
side of the room. It is worth thinking about why this is so much better than the letters. The letters must be read \
one by one, and the reader must know the alphabet, and must not be tired. The stair is seen as a whole, and a fault \
in it is seen before it is understood.

After that the book is sewn. The thread goes through the fold of the first section, out again, around a tape or a \
cord, into the fold of the second section, and back. A sewn book opens flat and stays together for hundreds of \
years, as long as the paper lasts. A glued book costs a third as much and stays together until it has been read \
with love four or five times. Both are honest work if the buyer is told which one he buys. The trouble begins when \
a glued book is dressed up as a sewn one, with a strip of coloured thread at the head and the foot of the spine \
that holds nothing. Binders have a word for such decoration, and it is not a friendly one.

The paper remembers how it was made. In the mill the fibres lie down in the direction in which the water runs, as \
logs do in a river, and a sheet therefore bends more easily one way than the other. If the fibres run from the head \
of the page to its foot, the leaves fall open and lie still. If they run from the spine to the edge, the leaves \
stand up like the hair of a frightened cat, and when the air becomes damp they swell along the spine and tear the \
thread out of its holes. You can find the direction with a strip of paper and a drop of water: the strip curls \
around the line of the fibres. Every binder does this before he does anything else, and every binder can tell you \
about the one time when he was in a hurry and did not.

None of this is written down in the book itself. When the work is done well the reader notices nothing: the pages \
come in their order, the book stays open on the table while he stirs his coffee, and the margins are where his \
thumbs want to be. The inner margin is the smallest, because two of them meet in the middle and are seen as one. \
The outer margin is larger, and the one at the foot is the largest of all, since a page whose margins are equal \
seems to slide down and fall out of the book. There are people who have measured these margins in old books and \
found beautiful proportions in them, and there are people who have measured other old books and found none. What is \
certain is that a page with room around it is read more slowly, and that a page without room is read more quickly \
and with less trust.

It may be asked why anybody should still learn such things, now that most of what we read has no pages at all. A \
screen has no grain and no back, and a text on it may be as long as it likes. And yet whoever builds the machines \
that keep our texts meets the old questions again. Where shall a long text be cut, so that its parts can be moved \
about and put together again? How do we know that no part is missing and that none has been taken twice? What may \
be made smaller without anybody noticing, and how do we measure what was lost? What has to stand in one piece, and \
what can lie anywhere as long as there is a table that tells us where? Those who kept texts before us had paper, \
thread and patience, and they found good answers. They folded large sheets into small pages, marked every fold, and \
put a list of what there is at the front. A page can be found in a moment, nothing needs to be moved when a chapter \
is added at the end, and two copies of one sheet are never printed where one will do.

There is one more thing that the folders of sheets can teach. They never worked on a single book. They folded all \
copies of the first sheet, and then all copies of the second, and nobody in the room could have said which copy \
would be whose. The work went quickly because it was done for many at a time, and it went well because each fold \
was the same as the one before. Only at the very end, on the long table, did the piles turn into books, each of \
them complete, each for a reader who would think that it had been made for him alone.
"""
