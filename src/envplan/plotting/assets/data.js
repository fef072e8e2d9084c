"use strict";
// The scripts of a page, which draw its charts from the data embedded in it: no network, no
// libraries. All files here end up in one script element, in the order that page.py lists them.

/**
 * The data of the charts, times in s, energies in J, powers in W. Classes of the same names in
 * plotting/page_data.py write them, and a test keeps both alike. plotting/serving.py writes series.
 *
 * @typedef {object} FrontierChart
 * @property {[number, number][]} curve - the exact relaxed frontier: pairs of s and J
 * @property {PlannerCurve[]} curves - further curves
 * @property {PlanPoint[]} plans - along the frontier, by ascending time
 * @property {PlanPoint[]} slower - beyond T_star, for stragglers
 * @property {PlanPoint[]} points - single plans with marks of their own
 * @property {PlanPoint} baseline - maximum frequency everywhere
 * @property {number} t_min
 * @property {number} t_star
 * @property {string[]} ends - names of T_min and T_star
 * @property {number} t_max - the slowest plan's time
 * @property {number} waiting_w - what all GPUs draw while they wait
 * @property {?number} straggler - a straggler's time when the page opens
 * @property {boolean} modelled
 *
 * @typedef {object} PlannerCurve
 * @property {string} planner
 * @property {string} label
 * @property {[number, number][]} points - pairs of s and J
 * @property {boolean} bound - a lower bound, not a line through plans
 *
 * @typedef {object} PlanPoint
 * @property {string} planner - "this_plan" for the plan that the page is about
 * @property {string} label
 * @property {number} time
 * @property {number} energy
 * @property {number} saved - percent, against maximum frequency
 * @property {number} slower - percent, against maximum frequency
 * @property {?number} gap - certified, a fraction
 * @property {number} power - average of all GPUs
 *
 * @typedef {object} TimelineChart
 * @property {TimelineData[]} timelines - from the top
 * @property {number} span - the length of their time axis
 *
 * @typedef {object} ExplorerChart
 * @property {FrontierChart} frontier
 * @property {TimelineData[]} frames - of the frontier's plans, then of its slower ones; or none.
 *   Those after the first have no microbatch, chunk, stage and kind: these are alike in all.
 * @property {StageFigures[][]} stages - for each frame, of each stage
 * @property {?{times: number[], watts: number[]}} power_before - at maximum frequency
 * @property {?number} average_before_w
 *
 * @typedef {object} TimelineData
 * @property {string} name
 * @property {string} title
 * @property {number} chunks
 * @property {number} stages
 * @property {string[]} kinds - the instructions that occur
 * @property {OperationColumns} ops
 * @property {Object<number, PartSpan[]>} parts - by operation, where parts have clocks of their own
 * @property {TimelineBubble[]} bubbles
 * @property {{times: number[], watts: number[]}} power - of all GPUs; one time more than watts
 * @property {number} average_w
 *
 * @typedef {object} OperationColumns - an entry for each operation
 * @property {number[]} microbatch
 * @property {number[]} chunk
 * @property {number[]} start
 * @property {number[]} mhz - 0 where it controls no clock
 * @property {number[]} slack - how much longer it could take
 * @property {number[]} stage
 * @property {number[]} kind - index into kinds
 * @property {number[]} time
 * @property {number[]} watts - average of one GPU
 * @property {number[]} critical - 1 on the critical path, else 0
 *
 * @typedef {[number, ?number, number, ?number, number]} StageFigures - J, percent saved, percent
 *   of the time waited, mean MHz, changes of clock
 * @typedef {[number, number, number, number, string]} PartSpan - begin, end, MHz, W, name
 * @typedef {[number, number, number, number]} TimelineBubble - stage, begin, end, usable time
 * @typedef {{label: string, from_zero: boolean, highest: ?number, lines: ?number[][]}} SeriesPanel - null: no
 *   value
 * @typedef {{times: number[], label: string, panels: SeriesPanel[], names: string[],
 *   colours: string[], dashes: string[]}} SeriesChart - names, colours and dashes are of the lines
 */

const DATA = JSON.parse(document.getElementById("data").textContent);
