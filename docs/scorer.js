// The score of a search result: headings that have the words of the question, then guides, then pages to
// look things up in, and last those for people who change halfstep.
var Scorer = {
  score: ([page, title, anchor, description, score, file, kind]) => {
    const isInternal = /^(architecture|benchmarks|changelog|genindex)$/.test(page);
    const isLookup = /^(doctor|versions|cookbook\/.*|api\/.*)$/.test(page);
    const isHeading = kind === "title";
    const isMostAsked = page === "diagnose";
    return score + (isHeading ? 10 : isMostAsked ? 1 : 0) - (isInternal ? 100 : isLookup ? 8 : 0);
  },
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};
// The words of a query, as Sphinx splits it, but without the 's of "torch.amp's": an s is on every page.
var splitQuery = (query) =>
  query.replace(/['’]s\b/g, "").split(/[^\p{Letter}\p{Number}_\p{Emoji_Presentation}]+/gu).filter((term) => term);
