// Sphinx's scores, but a heading that has the whole query comes before pages that have its words anywhere.
var Scorer = {
  score: ([docname, title, anchor, descr, score, filename, kind]) => score + (anchor && kind === "title" ? 100 : 0),
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};
